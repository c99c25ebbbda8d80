"""What a chat's messages may look like, and how templates expect them.

Owns the messages' schema. Knows nothing of templates, tokens and HTTP.
"""

import json
from typing import Any, NoReturn

from gllm.config.field_types import FieldError
from gllm.config.limits import MAX_CALLS, MAX_MESSAGES
from gllm.text.chat.tools import CUSTOM_INPUT_KEY

ROLES = ("system", "developer", "user", "assistant", "tool")

ChatMessage = dict[str, Any]


class ToolCallArguments(dict[str, Any]):
    """A call's arguments, for templates that go through them as for those that write them out.

    Some templates take an object, others a text to which they add more; so this is an object that
    stands for its own JSON text wherever a text is needed.
    """

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def normalize_messages(messages: object) -> list[ChatMessage]:
    """Return copies of the messages with their contents as text, and with the older `function_call`
    and role `function` as tool calls and their results. Raises FieldError naming `messages`."""
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise FieldError("messages", f"messages has to be a list of 1 to {MAX_MESSAGES}")
    last_call = ""
    made = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if isinstance(message, dict) and message.get("function_call"):
            last_call = f"call{i:05}"
            message = _without_function_call(where, message, last_call)
        elif isinstance(message, dict) and message.get("role") == "function":
            if not isinstance(message.get("name"), str):
                _refuse(where, "is of the role function, but has no name")
            message = {**message, "role": "tool", "tool_call_id": last_call or f"call{i:05}"}
        made.append(_checked(where, message))
    return made


def _without_function_call(where: str, message: ChatMessage, call_id: str) -> ChatMessage:
    """Return a message whose `function_call` is a tool call."""
    if message.get("tool_calls"):
        _refuse(where, "has both a function_call and tool_calls")
    kept = {name: value for name, value in message.items() if name != "function_call"}
    return {**kept, "tool_calls": [{"id": call_id, "function": message["function_call"]}]}


def _refuse(where: str, why: str) -> NoReturn:
    raise FieldError("messages", f"{where} {why}")


def _checked(where: str, message: object) -> ChatMessage:
    """A copy of one message without what is null, but for a content that may be."""
    if not isinstance(message, dict):
        _refuse(where, "has to be an object")
    role = message.get("role")
    if role not in ROLES:
        _refuse(where, f"has to have a role of {', '.join(ROLES)}")
    made = {name: value for name, value in message.items() if value is not None}
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if not isinstance(made.get(name, ""), str):
            _refuse(where, f"has a {name} that is no string")
    calls = made.pop("tool_calls", None)
    if calls:
        if role != "assistant":
            _refuse(where, "has tool_calls, but is not of the assistant")
        made["tool_calls"] = _checked_calls(where, calls)
    if "reasoning" in made:
        # Answers have both names; templates know the longer one.
        made["reasoning_content"] = made.pop("reasoning")
    made["content"] = _content(where, made)
    return made


def _content(where: str, message: ChatMessage) -> str | None:
    """The text of a message. Null only beside tool calls; nothing may stand for an empty text
    beside reasoning."""
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        if "tool_calls" in message:
            return None
        content = "" if "reasoning_content" in message else None
    text = content_text(content)
    if text is None:
        _refuse(where, "has to have a content that is a string or a list of parts of type text")
    return text


def content_text(content: object) -> str | None:
    """The text of a content, parts of it one per line; None where it is not text."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            return None
        text = part.get("text")
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "\n".join(texts)


def _checked_calls(where: str, calls: object) -> list[ChatMessage]:
    """Tool calls that were made, their arguments as objects."""
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        _refuse(where, f"has tool_calls that are no list of up to {MAX_CALLS}")
    made = []
    for i, call in enumerate(calls):
        here = f"{where}.tool_calls[{i}]"
        kind = call.get("type", "function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or kind not in ("function", "custom"):
            _refuse(here, "has to be an object of type function or custom")
        function = call.get("function")
        if kind == "custom":
            function = _custom_as_function(here, call.get("custom"))
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            _refuse(here, "has to have a function with a name")
        if not isinstance(call.get("id", ""), str):
            _refuse(here, "has an id that is no string")
        arguments = _arguments(here, function.get("arguments"))
        named = {"id": call["id"]} if "id" in call else {}
        called = {"name": function["name"], "arguments": arguments}
        made.append({**named, "type": "function", "function": called})
    return made


def _custom_as_function(where: str, custom: object) -> ChatMessage:
    """Return a call of a custom tool as one of the function that stands for it."""
    text = custom.get("input") if isinstance(custom, dict) else None
    if not isinstance(custom, dict) or not isinstance(text, str):
        _refuse(where, "has to have a custom with a name and an input that is a string")
    return {
        "name": custom.get("name"),
        "arguments": json.dumps({CUSTOM_INPUT_KEY: text}, ensure_ascii=False),
    }


def _arguments(where: str, given: object) -> ToolCallArguments:
    """Arguments given as the text of a JSON object, or as the object."""
    try:
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        values = json.loads(text) if text not in ("", "null") else {}
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        _refuse(where, "has arguments that are not the text of a JSON object")
    return ToolCallArguments(values, text if values else "{}")
