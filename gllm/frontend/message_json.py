"""Write assistant messages of chat completions as JSON, whole and in increments."""

from gllm.frontend.answer import JsonObject
from gllm.text.output.events import (
    AssistantMessage,
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCall,
    ToolCallArgumentsDelta,
    ToolCallStart,
)


def message_to_json(message: AssistantMessage, legacy: bool = False) -> JsonObject:
    """Return a whole message.

    `content` is null if the message has no text but reasoning or tool calls.

    Args:
        message: The parsed output of a choice.
        legacy: Write the first call as `function_call`, for clients that sent `functions`.
    """
    has_other_parts = bool(message.reasoning or message.tool_calls)
    content = message.content or (None if has_other_parts else "")
    fields: JsonObject = {"role": "assistant", "content": content}
    if message.reasoning:
        fields |= _reasoning_fields(message.reasoning)
    if message.tool_calls:
        calls = [call.to_dict() for call in message.tool_calls.values()]
        if legacy:
            fields["function_call"] = calls[0]["function"]
        else:
            fields["tool_calls"] = calls
    return fields


class MessageDeltaWriter:
    """Writes the increments of one choice.

    `legacy`: write the first call as `function_call`, for clients that sent `functions`.
    """

    def __init__(self, legacy: bool) -> None:
        self._legacy = legacy
        self._custom: set[int] = set()
        """Indices of calls of custom tools."""

    def event_to_json(self, event: OutputEvent) -> JsonObject | None:
        """Return an event as an increment, or None if it adds nothing."""
        match event:
            case ContentDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return _reasoning_fields(text)
            case ToolCallStart(index, call_id, name, is_custom):
                if is_custom:
                    self._custom.add(index)
                call = {
                    "index": index,
                    **ToolCall(call_id, name, is_custom=is_custom).to_dict(),
                }
                return self._call_fields(index, call)
            case ToolCallArgumentsDelta(index, text):
                if index in self._custom:
                    return self._call_fields(index, {"index": index, "custom": {"input": text}})
                return self._call_fields(index, {"index": index, "function": {"arguments": text}})
            case _:
                return None

    def _call_fields(self, index: int, call: JsonObject) -> JsonObject | None:
        if not self._legacy:
            return {"tool_calls": [call]}
        # `function_call` can hold a single call.
        return {"function_call": call["function"]} if index == 0 else None


def _reasoning_fields(text: str) -> JsonObject:
    """Return reasoning under both names that clients read."""
    return {"reasoning": text, "reasoning_content": text}
