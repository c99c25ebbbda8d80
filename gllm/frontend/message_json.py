"""Messages of the assistant, whole and in increments, as chat completions write them.

Owns this JSON. Knows nothing of chunks and choices.
"""

from gllm.frontend.answer import Json
from gllm.text.output.events import (
    CallArguments,
    CallStart,
    Content,
    Event,
    Message,
    Reasoning,
)


def message_json(message: Message) -> Json:
    """A whole message. Content is null where there is something else instead."""
    other = message.reasoning or message.calls
    written: Json = {"role": "assistant", "content": message.content or (None if other else "")}
    if message.reasoning:
        written |= _reasoning(message.reasoning)
    if message.calls:
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls.values()
        ]
    return written


def delta_json(event: Event) -> Json | None:
    """An increment; None where there is nothing to be told."""
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return _reasoning(text)
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case _:
            return None


def _reasoning(text: str) -> Json:
    """Under both names that clients look for."""
    return {"reasoning": text, "reasoning_content": text}
