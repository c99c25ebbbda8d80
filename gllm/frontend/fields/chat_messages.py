"""Build chat messages from the items and content blocks of other chat APIs."""

from collections.abc import Sequence

from gllm.frontend.fields.base import JsonObject, Warn
from gllm.frontend.fields.value_errors import raise_field_error, raise_unsupported
from gllm.text.chat.placeholders import (
    MediaPartError,
    describe_part,
    describe_parts,
    is_media_part,
)


class ChatMessageBuilder:
    """Builds the `messages` list of a chat completion from the input items of another API.

    Texts, tool calls and tool results are added one at a time; consecutive ones of the assistant
    share a message.

    Args:
        merge_user_messages: Combine consecutive user messages into one.
    """

    def __init__(self, merge_user_messages: bool = False) -> None:
        self._messages: list[JsonObject] = []
        self._merge_user_messages = merge_user_messages
        self._texts: list[str] = []
        """Texts of the last message that are not joined yet: joining each time is quadratic."""

    @property
    def messages(self) -> list[JsonObject]:
        """The messages so far."""
        self._join_texts()
        return self._messages

    def add_message(self, role: str, text: str) -> None:
        """Add a system, developer or user message.

        System messages at the start become one message, because chat templates support only one.
        """
        system_roles = ("system", "developer")
        last_role = self._last_role()
        if role in system_roles and last_role in system_roles and len(self._messages) == 1:
            self._texts += ["\n\n", text]
        elif role == last_role == "user" and self._merge_user_messages:
            self._texts += ["\n", text]
        else:
            self._append({"role": role, "content": text})
            self._texts = [text]

    def add_reasoning(self, text: str) -> None:
        """Add reasoning to the assistant message whose text or tool call follows."""
        message = self._assistant_message("reasoning_content", "content", "tool_calls")
        message["reasoning_content"] = text

    def add_assistant_text(self, text: str) -> None:
        """Add text of the assistant, to its last message if that has no text and no tool calls."""
        self._assistant_message("content", "tool_calls")["content"] = text

    def add_tool_call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a tool call of the assistant; `arguments` is the text of a JSON object."""
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._assistant_message().setdefault("tool_calls", []).append(call)

    def add_tool_result(self, call_id: str, text: str) -> None:
        """Add the result of a tool call."""
        self._append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _assistant_message(self, *absent_keys: str) -> JsonObject:
        """Return the last message if it is the assistant's and lacks the keys, else add one."""
        is_assistant = self._last_role() == "assistant"
        if not is_assistant or any(self._messages[-1].get(key) for key in absent_keys):
            self._append({"role": "assistant", "content": ""})
        return self._messages[-1]

    def _last_role(self) -> str:
        """Return the role of the last message; empty without one."""
        return self._messages[-1]["role"] if self._messages else ""

    def _append(self, message: JsonObject) -> None:
        self._join_texts()
        self._messages.append(message)
        self._texts = []

    def _join_texts(self) -> None:
        """Complete the last message."""
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
            self._messages[-1]["content"] = self._texts[0]


def parse_object_list(value: object, path: str) -> list[JsonObject]:
    """Check that a JSON value is a list of objects, and return it.

    Args:
        value: The JSON value.
        path: Path of the value in the request body, for errors.

    Raises:
        FieldError: The value has another type.
    """
    if not isinstance(value, list):
        raise_field_error(path, "a list of objects", value)
    for index, member in enumerate(value):
        if not isinstance(member, dict):
            raise_field_error(f"{path}[{index}]", "an object", member)
    return value


def get_string(values: JsonObject, name: str, path: str) -> str:
    """Return the string at a required key of a JSON object.

    Args:
        values: The JSON object.
        name: The key.
        path: Path of the object in the request body, for errors.

    Raises:
        FieldError: The key is absent, or its value is not a string.
    """
    value = values.get(name)
    if not isinstance(value, str):
        raise_field_error(f"{path}.{name}", "a string", value)
    return value


def parse_text(
    content: object, path: str, part_types: Sequence[str], shows_media: bool = False
) -> str:
    """Return the text of a message's `content`; texts of several parts are joined by newlines.

    Args:
        content: A string or a list of content parts.
        path: Path of the value in the request body, for errors.
        part_types: Allowed `type` values of a part. The text of a `refusal` has that name, that of
            others is `text`.
        shows_media: Replace images and files by a text that says so, instead of an error.

    Raises:
        FieldError: The content is neither, or a part has another type.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise_field_error(path, "a string or a list of objects", content)
    texts = []
    for index, part in enumerate(parse_object_list(content, path)):
        part_path = f"{path}[{index}]"
        if shows_media and is_media_part(part):
            texts.append(describe_part(part))
            continue
        check_type(part, part_path, part_types)
        name = "refusal" if part["type"] == "refusal" else "text"
        texts.append(get_string(part, name, part_path))
    return "\n".join(texts)


def parse_result_text(content: object, path: str) -> str:
    """Return the text of a tool result; a part that is not text becomes a text that says so.

    Args:
        content: A string, a list of content parts, or None.
        path: Path of the value in the request body, for errors.

    Raises:
        FieldError: The content is neither, or a text is not a string.
    """
    text = describe_parts(content)
    if text is None:
        raise_field_error(path, "a string or a list of objects", content)
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if "text" in part or part.get("type") in (None, "text", "input_text", "output_text"):
            get_string(part, "text", f"{path}[{index}]")
    return text


def is_hosted_tool(tool: JsonObject) -> bool:
    """Return True for a tool that the API's own server runs or defines, such as a web search."""
    kind = tool.get("type")
    return isinstance(kind, str) and kind not in ("function", "custom", "namespace")


def warn_left_out(warn: Warn, value: JsonObject, path: str) -> None:
    """Warn that a part of the request has no effect because this server lacks its type."""
    warn(f"{path} of type {value.get('type')!s:.100} is left out: this server does not have it")


def check_type(value: JsonObject, path: str, supported_types: Sequence[str]) -> None:
    """Check that the `type` of a JSON object is one of the supported types.

    Args:
        value: The JSON object.
        path: Path of the object in the request body, for errors.
        supported_types: Allowed values of `type`.

    Raises:
        FieldError: The type is another one.
    """
    kind = value.get("type")
    if kind in supported_types:
        return
    rule = (
        f"one of {', '.join(supported_types)}" if len(supported_types) > 1 else supported_types[0]
    )
    if is_media_part(value):
        raise_unsupported(
            path, f"has the type {kind!r:.100}, which is not supported: use {rule}", MediaPartError
        )
    if isinstance(kind, str):
        raise_unsupported(path, f"has the type {kind!r:.100}, which is not supported: use {rule}")
    raise_field_error(f"{path}.type", rule, kind)
