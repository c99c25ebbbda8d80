"""Validate chat messages and convert them into the form that chat templates expect."""

import json
from collections.abc import Callable
from typing import Any, NoReturn

from gllm.options.field_types import FieldError
from gllm.options.limits import MAX_CALLS, MAX_MESSAGES
from gllm.text.chat.placeholders import (
    MediaPartError,
    describe_part,
    find_question,
    is_media_part,
)
from gllm.text.chat.tools import CUSTOM_INPUT_KEY
from gllm.text.surrogates import replace_surrogates_in

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages; the deprecated role `function` becomes `tool`."""

RAW_ARGUMENTS_KEY = "arguments"
"""Name of the argument with the text of a call whose arguments are not a JSON object, for templates
that read them as an object."""

ChatMessage = dict[str, Any]


class ToolCallArguments(dict[str, Any]):
    """Arguments of a tool call that a chat template can use as an object or as JSON text.

    Some templates iterate over the arguments as an object, others concatenate them to a string. The
    object therefore converts into its own JSON text wherever a string is needed.
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


def normalize_messages(
    messages: object, takes_parts: Callable[[str], bool] = lambda role: False
) -> list[ChatMessage]:
    """Validate the `messages` of a chat request; return copies as chat templates expect them.

    A deprecated `function_call` becomes a tool call, and a message with role `function` its result.
    Images and files become a text that says so in results of tools and in all messages of the user
    but the last.

    Args:
        messages: The conversation, not yet validated.
        takes_parts: Returns True if the template expects a content of several parts as such, by
            the message's role; other contents become a text with a line per part.

    Raises:
        FieldError: A message is invalid; the error names `messages`.
    """
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise FieldError("messages", f"messages must be a list of 1 to {MAX_MESSAGES}")
    last_call_id = ""
    normalized = []
    question = find_question(messages)
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        if isinstance(message, dict) and message.get("function_call"):
            last_call_id = f"call{i:05}"
            message = _with_tool_call(path, message, last_call_id)
        elif isinstance(message, dict) and message.get("role") == "function":
            if not isinstance(message.get("name"), str):
                _fail(path, "has the role function, but no name")
            message = {**message, "role": "tool", "tool_call_id": last_call_id or f"call{i:05}"}
        normalized.append(_normalize(path, message, i != question, takes_parts))
    return normalized


def _with_tool_call(path: str, message: ChatMessage, call_id: str) -> ChatMessage:
    """Return a message with a tool call in place of its `function_call`."""
    if message.get("tool_calls"):
        _fail(path, "has both a function_call and tool_calls")
    kept = {name: value for name, value in message.items() if name != "function_call"}
    return {**kept, "tool_calls": [{"id": call_id, "function": message["function_call"]}]}


def _fail(path: str, problem: str) -> NoReturn:
    raise FieldError("messages", f"{path} {problem}")


def _normalize(
    path: str, message: object, shows_media: bool, takes_parts: Callable[[str], bool]
) -> ChatMessage:
    """Return a copy of one message without null values, except for a content that may be null.

    With `shows_media`, images and files become a text that says so.
    """
    if not isinstance(message, dict):
        _fail(path, "must be an object")
    role = message.get("role")
    if role not in ROLES:
        _fail(path, f"must have one of the roles {', '.join(ROLES)}")
    normalized = {name: value for name, value in message.items() if value is not None}
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if not isinstance(normalized.get(name, ""), str):
            _fail(path, f"has a {name} that is not a string")
    calls = normalized.pop("tool_calls", None)
    if calls:
        if role != "assistant":
            _fail(path, "has tool_calls, but not the role assistant")
        normalized["tool_calls"] = _normalize_calls(path, calls)
    if "reasoning" in normalized:
        # Answers have both names; templates know the longer one.
        normalized["reasoning_content"] = normalized.pop("reasoning")
    keeps_parts = isinstance(normalized.get("content"), list) and takes_parts(role)
    normalized["content"] = _normalize_content(path, normalized, shows_media, keeps_parts)
    return normalized


def _normalize_content(
    path: str, message: ChatMessage, shows_media: bool, keeps_parts: bool
) -> str | list[ChatMessage] | None:
    """Return the text of a message, or its parts; None for a null content beside tool calls.

    Only an assistant's content may be null or missing: an answer can be empty.
    """
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        if "tool_calls" in message:
            return None
        refusal = message.get("refusal")
        content = refusal if isinstance(refusal, str) else ""
    texts = [content] if isinstance(content, str) else _part_texts(content, shows_media)
    if texts is None:
        parts = content if isinstance(content, list) else []
        if media := next(filter(is_media_part, parts), None):
            problem = f"{path} has a content part of type {media['type']}, which is not supported"
            raise MediaPartError("messages", problem)
        _fail(path, "must have a content that is a string or a list of parts of type text")
    return [{"type": "text", "text": text} for text in texts] if keeps_parts else "\n".join(texts)


def get_content_text(content: object) -> str | None:
    """Return the text of a message's `content`, a line per part; None if it is not text.

    Args:
        content: A text, or a list of parts.
    """
    texts = [content] if isinstance(content, str) else _part_texts(content)
    return None if texts is None else "\n".join(texts)


def _part_texts(content: object, shows_media: bool = False) -> list[str] | None:
    """Return the texts of a list of parts; None if one is not text.

    With `shows_media`, images and files become a text that says so.
    """
    if not isinstance(content, list):
        return None
    texts = []
    for part in content:
        if shows_media and is_media_part(part):
            texts.append(describe_part(part))
            continue
        if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
            return None
        text = part.get(part["type"])
        if not isinstance(text, str):
            return None
        texts.append(text)
    return texts


def _normalize_calls(path: str, calls: object) -> list[ChatMessage]:
    """Return the tool calls of a message as calls of functions, with arguments as objects."""
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        _fail(path, f"has tool_calls that are not a list of at most {MAX_CALLS}")
    normalized = []
    for i, call in enumerate(calls):
        call_path = f"{path}.tool_calls[{i}]"
        kind = call.get("type", "function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or kind not in ("function", "custom"):
            _fail(call_path, "must be an object of type function or custom")
        function = call.get("function")
        if kind == "custom":
            function = _custom_as_function(call_path, call.get("custom"))
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            _fail(call_path, "must have a function with a name")
        if not isinstance(call.get("id", ""), str):
            _fail(call_path, "has an id that is not a string")
        arguments = _parse_arguments(call_path, function.get("arguments"))
        call_id = {"id": call["id"]} if "id" in call else {}
        body = {"name": function["name"], "arguments": arguments}
        normalized.append({**call_id, "type": "function", "function": body})
    return normalized


def _custom_as_function(path: str, custom: object) -> ChatMessage:
    """Return a call of a custom tool as a call of the function that stands for it."""
    text = custom.get("input") if isinstance(custom, dict) else None
    if not isinstance(custom, dict) or not isinstance(text, str):
        _fail(path, "must have a custom with a name and an input that is a string")
    return {"name": custom.get("name"), "arguments": _to_json({CUSTOM_INPUT_KEY: text})}


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _parse_arguments(path: str, arguments: object) -> ToolCallArguments:
    """Return arguments that are a JSON object, or a text.

    A text is what a model has written, so any is accepted: most are the text of a JSON object.
    """
    if arguments is not None and not isinstance(arguments, str | dict):
        _fail(path, "has arguments that are neither an object nor a text")
    try:
        text = arguments if isinstance(arguments, str) else _to_json(arguments)
        values = json.loads(text) if text.strip() not in ("", "null") else {}
        values = replace_surrogates_in(values)
    except RecursionError:
        if not isinstance(arguments, str):
            _fail(path, "has arguments that are nested too deeply")
        values = None
    except ValueError:
        values = None
    if not isinstance(values, dict):
        values = {RAW_ARGUMENTS_KEY: text}
    return ToolCallArguments(values, text if values else "{}")
