"""Messages of the assistant, whole and in increments, as chat completions write them.

Owns this JSON. Knows nothing of chunks and choices.
"""

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
    """Return a whole message. Content is null where there is something else instead.

    legacy: Show a call as `function_call`, of which a message has one.
    """
    other = message.reasoning or message.tool_calls
    written: JsonObject = {
        "role": "assistant",
        "content": message.content or (None if other else ""),
    }
    if message.reasoning:
        written |= _reasoning(message.reasoning)
    if message.tool_calls:
        calls = [call.to_dict() for call in message.tool_calls.values()]
        if legacy:
            written["function_call"] = calls[0]["function"]
        else:
            written["tool_calls"] = calls
    return written


class MessageDeltaWriter:
    """Writes the increments of one choice."""

    def __init__(self, legacy: bool) -> None:
        self._legacy = legacy
        self._custom: set[int] = set()
        """Indices of calls of custom tools."""

    def delta_json(self, event: OutputEvent) -> JsonObject | None:
        """Return an increment; None for an event that adds nothing."""
        match event:
            case ContentDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return _reasoning(text)
            case ToolCallStart(index, call_id, name, is_custom):
                if is_custom:
                    self._custom.add(index)
                call = {"index": index, **ToolCall(call_id, name, is_custom=is_custom).to_dict()}
                return self._calls(index, call)
            case ToolCallArgumentsDelta(index, text):
                if index in self._custom:
                    return self._calls(index, {"index": index, "custom": {"input": text}})
                return self._calls(index, {"index": index, "function": {"arguments": text}})
            case _:
                return None

    def _calls(self, index: int, call: JsonObject) -> JsonObject | None:
        if not self._legacy:
            return {"tool_calls": [call]}
        # The older shape has room for one call.
        return {"function_call": call["function"]} if index == 0 else None


def _reasoning(text: str) -> JsonObject:
    """Under both names that clients look for."""
    return {"reasoning": text, "reasoning_content": text}
