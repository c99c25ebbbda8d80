"""Render chat messages into a prompt with a model's Jinja template, in a sandbox with limits."""

import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gllm.options.field_types import FieldError
from gllm.text.added_tokens import read_json_object
from gllm.text.chat.content_parts import loops_over_content
from gllm.text.chat.harmony_messages import to_harmony_messages, with_description
from gllm.text.chat.messages import (
    ChatMessage,
    ToolCallArguments,
    get_content_text,
    normalize_messages,
)
from gllm.text.chat.strict_turns import rearrangements

MAX_CHARACTERS = 32 * 2**20
"""Size limit of a rendered chat, in characters."""
MAX_SECONDS = 10.0
"""Time limit of one rendering."""
_NULL_TEST = re.compile(r"""\bcontent(['"]\])?\s+is\s+(not\s+)?none""")
"""Expression by which a template tells a null content from an empty text."""


class RejectedChatError(FieldError):
    """The template rejects the messages, as by their order. Another order may be accepted."""


class GenerationTag(Extension):
    """Jinja extension for `{% generation %}` blocks, which mark training text; renders the body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares a plain set)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body of the block in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """Compiled Jinja chat template of a model, which renders messages and tools as a prompt.

    Args:
        source: Jinja source of the template.
        special_tokens: Text of bos_token, eos_token and others, by name.
        tool_source: Source of another template for chats with tools, if the model has one.
        model_type: `model_type` of config.json.

    Raises:
        ValueError: The source is not a valid template.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        tool_source: str | None = None,
        model_type: str = "",
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        # The local date, for templates that state it in the prompt.
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        tools_source = source if tool_source is None else tool_source
        try:
            self._plain = environment.from_string(source)
            self._with_tools = environment.from_string(tools_source)
            trees = [environment.parse(text) for text in {source, tools_source}]
            self.variables = set[str]().union(*map(find_undeclared_variables, trees))
            """Names of the variables that the template uses."""
            tool_variables = find_undeclared_variables(environment.parse(tools_source))
        except TemplateError as error:
            raise ValueError(f"the model's chat template is broken: {error}") from error
        self.supports_tools = "tools" in tool_variables
        """True if the template renders tools."""
        self.source = source if tool_source is None else source + tool_source
        """Source of the template, with that of the template for tools."""
        self.model_type = model_type
        self._special_tokens = dict(special_tokens)
        self._loops_over_content = any(map(loops_over_content, trees))
        self._takes_parts: dict[str, bool] = {}
        self._supports_developer_role = "developer" in source
        self._has_channels = "<|channel|>analysis" in self.source
        self._supports_null_content = _NULL_TEST.search(self.source) is not None

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Text of bos_token, eos_token and others, by name."""
        return self._special_tokens

    def render(
        self,
        messages: object,
        add_generation_prompt: bool = True,
        options: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] = (),
        continue_final: bool = False,
        as_searchable: Callable[[str], str] = str,
    ) -> str:
        """Render a chat as the text of its prompt.

        If the template rejects the order of roles, system messages that are not at the start become
        part of the neighboring turns of the user, and consecutive messages of a role become one.

        Args:
            messages: The conversation, not yet validated.
            add_generation_prompt: End with the header of an assistant message.
            options: Variables of the template.
            tools: The tools, in the form that templates expect.
            continue_final: End inside the last message, which is the assistant's: at the end of its
                content, or of its reasoning if the content is null.
            as_searchable: Converts texts of messages to ones in which the template searches.

        Raises:
            FieldError: The messages are invalid, or the template raised an error; the error names
                `messages` or `continue_final_message`.
        """
        normalized = normalize_messages(messages, self.takes_parts)
        for message in normalized:
            # The newer name of the system role; templates drop or misplace an unknown role.
            if message["role"] == "developer" and not self._supports_developer_role:
                message["role"] = "system"
            # Templates without a test for null would fail, or write it as a word.
            if message["content"] is None and not self._supports_null_content:
                message["content"] = ""
        mark = secrets.token_hex(16) if continue_final else ""
        if continue_final:
            last = normalized[-1]
            if last["role"] != "assistant" or "tool_calls" in last:
                raise FieldError(
                    "continue_final_message",
                    "continue_final_message requires a text of the assistant as the last message",
                )
            assert isinstance(messages, list)  # normalize_messages() checks it.
            if continues_reasoning(messages[-1]):
                last["reasoning_content"] += mark
            elif isinstance(last["content"], list) and last["content"]:
                last["content"][-1]["text"] += mark
            else:
                last["content"] = (last["content"] or "") + mark
        if self._has_channels:
            normalized = to_harmony_messages(normalized)
        text = self._rendered_in_some_order(
            self._with_tools if tools else self._plain,
            as_searchable,
            {
                **self._special_tokens,
                "documents": None,
                **(options or {}),
                "messages": normalized,
                "tools": list(map(with_description, tools) if self._has_channels else tools)
                or None,
                "add_generation_prompt": add_generation_prompt,
            },
        )
        if not continue_final:
            return text
        text, separator, _ = text.rpartition(mark)
        if not separator:
            raise FieldError("messages", "the chat template does not render the last message")
        return text

    def takes_parts(self, role: str) -> bool:
        """Return True if the template loops over the parts of a message of this role.

        Others get their texts, a line per part.
        """
        if role not in self._takes_parts:
            self._takes_parts[role] = self._loops_over_content and self._shows_parts(role)
        return self._takes_parts[role]

    def _shows_parts(self, role: str) -> bool:
        """Render a message with two parts, and return True if their texts follow one another.

        A template may loop over the content for other roles alone, and fail for this one or write
        the list.
        """
        first, second = (secrets.token_hex(16) for _ in range(2))
        try:
            text = self._rendered_parts(
                role, [{"type": "text", "text": t} for t in (first, second)]
            )
        except FieldError:
            return False
        _, first_found, rest = text.partition(first)
        between, second_found, _ = rest.partition(second)
        return bool(first_found and second_found) and "type" not in between

    def _rendered_parts(self, role: str, content: object) -> str:
        """Render a short chat in which the message of a role has a content. Raises FieldError."""
        question = {"role": "user", "content": "x"}
        message = {"role": role, "content": content}
        function = {"name": "f", "arguments": ToolCallArguments({}, "{}")}
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
        }
        chats = {
            "user": [message],
            "assistant": [question, message],
            "tool": [question, call, message | {"tool_call_id": "call00000"}],
        }
        variables = {
            **self._special_tokens,
            "messages": chats.get(role, [message, question]),
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
        }
        return self._rendered(self._plain, variables, time.monotonic() + MAX_SECONDS)

    def _rendered_in_some_order(
        self, template: Template, as_searchable: Callable[[str], str], variables: dict[str, Any]
    ) -> str:
        """Render a chat, rearranged if the template rejects it. Raises FieldError.

        The error is that of the chat as it is.
        """
        deadline = time.monotonic() + MAX_SECONDS

        def rendered(messages: list[ChatMessage]) -> str:
            searchable = [_searchable(message, as_searchable) for message in messages]
            return self._rendered(template, {**variables, "messages": searchable}, deadline)

        try:
            return rendered(variables["messages"])
        except RejectedChatError as error:
            # A template may test for null in one place and take the content's length in another.
            texts = [message | {"content": _text_of(message)} for message in variables["messages"]]
            for messages in (texts, *rearrangements(texts)):
                with suppress(RejectedChatError):
                    return rendered(messages)
            raise error

    def _rendered(self, template: Template, variables: dict[str, Any], deadline: float) -> str:
        pieces: list[str] = []
        size = 0
        try:
            for piece in template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_CHARACTERS or time.monotonic() > deadline:
                    raise FieldError("messages", "the rendered chat is too large")
        except FieldError:
            raise
        except Exception as error:  # a template may raise anything for unusual messages
            raise RejectedChatError(
                "messages", f"the chat template rejects the messages: {error}"
            ) from error
        return "".join(pieces)


def continues_reasoning(message: Mapping[str, Any]) -> bool:
    """Return True if continuing an assistant's message means more reasoning: it has no content."""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return message.get("content") is None and bool(reasoning)


def _text_of(message: ChatMessage) -> str:
    """Return the content of a normalized message as a text."""
    return get_content_text(message["content"]) or ""


def _searchable(message: ChatMessage, as_searchable: Callable[[str], str]) -> ChatMessage:
    """Return a message with converted texts, in which a template may search for tokens."""
    texts = {name: message.get(name) for name in ("content", "reasoning_content", "thinking")}
    converted: ChatMessage = {
        name: as_searchable(text) for name, text in texts.items() if isinstance(text, str)
    }
    if isinstance(message["content"], list):
        parts = message["content"]
        converted["content"] = [part | {"text": as_searchable(part["text"])} for part in parts]
    return message | converted


def load_chat_template(folder: Path, file: Path | None = None) -> ChatTemplate | None:
    """Load the chat template of a model folder, or from a file; return None if there is none.

    Args:
        folder: The model folder.
        file: A template to use instead of the folder's own.

    Raises:
        ValueError: The template or a configuration file is invalid.
        OSError: The file cannot be read.
    """
    config = read_json_object(folder / "tokenizer_config.json")
    replacement = None if file is None else {"default": file.read_text(encoding="utf-8")}
    sources = replacement or _template_sources(folder, config)
    if "default" not in sources:
        return None
    model_type = read_json_object(folder / "config.json").get("model_type")
    model_type = model_type if isinstance(model_type, str) else ""
    tokens = _special_tokens(folder, config)
    return ChatTemplate(sources["default"], tokens, sources.get("tool_use"), model_type)


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the named special tokens of a tokenizer, which templates get as variables.

    special_tokens_map.json has precedence where tokenizer_config.json has no added_tokens_decoder,
    as older files do not; extra_special_tokens that are an object have names of their own.
    """
    settings = dict(config)
    if "added_tokens_decoder" not in config:
        settings |= read_json_object(folder / "special_tokens_map.json")
    extra = settings.get("extra_special_tokens")
    named = {name: token for name, token in settings.items() if name.endswith("_token")}
    named |= extra if isinstance(extra, dict) else {}
    texts = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in named.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _template_sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the template sources by name; most models have only `default`.

    The default template is in chat_template.jinja or in JSON, others may be in the folder
    additional_chat_templates.
    """
    additional = {
        file.stem: file.read_text(encoding="utf-8")
        for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    file = folder / "chat_template.jinja"
    if file.is_file():
        return additional | {"default": file.read_text(encoding="utf-8")}
    template = read_json_object(folder / "chat_template.json").get("chat_template")
    template = template or config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template} | additional
    return additional | ({"default": template} if isinstance(template, str) else {})


def _to_json(
    value: Any,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
    ensure_ascii: bool = False,
) -> str:
    """Return JSON as templates expect it: Jinja's own filter escapes characters of HTML."""
    return json.dumps(
        value,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        ensure_ascii=ensure_ascii,
    )


def _raise_exception(message: str) -> NoReturn:
    """Raise the error of a template that rejects a chat."""
    raise TemplateError(message)
