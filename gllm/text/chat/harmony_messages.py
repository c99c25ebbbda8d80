"""Shape messages and tools as the chat templates of gpt-oss expect them (Harmony).

The templates read the reasoning as `thinking`, reject a tool call with both reasoning and content,
render the first call of a message only, and name a result after the last call before it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gllm.text.chat.messages import ChatMessage, get_content_text


def to_harmony_messages(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return normalized messages with one call each, behind which its results follow."""
    shaped: list[ChatMessage] = []
    index = 0
    while index < len(messages):
        message = _with_thinking(messages[index])
        index += 1
        calls = message.get("tool_calls", [])
        if len(calls) < 2:
            shaped.append(message)
            continue
        results = []
        while index < len(messages) and messages[index]["role"] == "tool":
            results.append(messages[index])
            index += 1
        shaped += _split_calls(message, results)
    return shaped


def _with_thinking(message: ChatMessage) -> ChatMessage:
    """Return a message with its reasoning as `thinking`; content beside a call follows in it."""
    if "reasoning_content" not in message:
        return message
    message = message | {"thinking": message["reasoning_content"]}
    if "tool_calls" in message and (text := get_content_text(message["content"])):
        message |= {"thinking": f"{message['thinking']}\n\n{text}", "content": ""}
    return message


def _split_calls(message: ChatMessage, results: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return a message per call; results without the id of a call follow the last one."""
    shaped: list[ChatMessage] = []
    rest = list(results)
    for call in message["tool_calls"]:
        first = message if not shaped else {"role": message["role"], "content": ""}
        shaped.append(first | {"tool_calls": [call]})
        own = [result for result in rest if result.get("tool_call_id") == call.get("id")]
        shaped += own
        rest = [result for result in rest if result not in own]
    return shaped + rest


def with_description(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool with a description, without which the templates fail."""
    return {**tool, "function": {"description": "", **tool["function"]}}
