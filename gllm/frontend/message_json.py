"""Write assistant messages of chat completions as JSON, whole and in increments."""

import msgspec

from gllm.frontend.response_schemas import (
    ChatMessage,
    ChatMessageDelta,
    ChatToolCall,
    CustomToolInput,
    FunctionCall,
)
from gllm.text.output.events import (
    AssistantMessage,
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCall,
    ToolCallArgumentsDelta,
    ToolCallStart,
)


def message_to_json(message: AssistantMessage, legacy: bool = False) -> ChatMessage:
    """Return a whole message.

    `content` is null if the message has no text but reasoning or tool calls.

    Args:
        message: The parsed output of a choice.
        legacy: Write the first call as `function_call`, for clients that sent `functions`.
    """
    has_other_parts = bool(message.reasoning or message.tool_calls)
    content = message.content or (None if has_other_parts else "")
    answer = ChatMessage("assistant", content)
    if message.reasoning:
        answer.reasoning = answer.reasoning_content = message.reasoning
    if message.tool_calls:
        calls = [_chat_tool_call(call) for call in message.tool_calls.values()]
        if legacy:
            answer.function_call = calls[0].function
        else:
            answer.tool_calls = calls
    return answer


def _chat_tool_call(call: ToolCall) -> ChatToolCall:
    return msgspec.convert(call.to_dict(), ChatToolCall)


class MessageDeltaWriter:
    """Writes the increments of one choice.

    `legacy`: write the first call as `function_call`, for clients that sent `functions`.
    """

    def __init__(self, legacy: bool) -> None:
        self._legacy = legacy
        self._custom: set[int] = set()
        """Indices of calls of custom tools."""

    def event_to_json(self, event: OutputEvent) -> ChatMessageDelta | None:
        """Return an event as an increment, or None if it adds nothing."""
        match event:
            case ContentDelta(text):
                return ChatMessageDelta(content=text)
            case ReasoningDelta(text):
                # Under both names that clients read.
                return ChatMessageDelta(reasoning=text, reasoning_content=text)
            case ToolCallStart(index, call_id, name, is_custom):
                if is_custom:
                    self._custom.add(index)
                call = _chat_tool_call(ToolCall(call_id, name, is_custom=is_custom))
                call.index = index
                return self._call_delta(index, call)
            case ToolCallArgumentsDelta(index, text):
                if index in self._custom:
                    part = ChatToolCall(index, custom=CustomToolInput(input=text))
                else:
                    part = ChatToolCall(index, function=FunctionCall(arguments=text))
                return self._call_delta(index, part)
            case _:
                return None

    def _call_delta(self, index: int, call: ChatToolCall) -> ChatMessageDelta | None:
        if not self._legacy:
            return ChatMessageDelta(tool_calls=[call])
        # `function_call` can hold a single call.
        return ChatMessageDelta(function_call=call.function) if index == 0 else None
