"""Chat messages to the text a model was trained on, by the Jinja template it ships.

Owns the sandbox the template runs in and its limits. Knows nothing of tokens and of HTTP.
"""

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gllm.config.field_types import FieldError
from gllm.text.chat.messages import ChatMessage, normalize_messages

MAX_TEXT = 32 * 2**20
"""Characters a rendered chat may have."""
MAX_SECONDS = 10.0
"""Time a rendering may take."""
_ASKS_FOR_NULL = re.compile(r"""\bcontent(['"]\])?\s+is\s+(not\s+)?none""")
"""How a template tells a message without content from one with an empty text."""


class GenerationTag(Extension):
    """`{% generation %}`: marks the assistant's part for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares a plain set)

    def parse(self, parser: Parser) -> nodes.Node:
        """The body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A compiled chat template. Raises ValueError where its source is no template.

    with_tools: another source for chats with tools, where the model has one. model_type: the
    model's kind, as its config.json says.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        with_tools: str | None = None,
        model_type: str = "",
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        tools_source = source if with_tools is None else with_tools
        try:
            self._plain = environment.from_string(source)
            self._with_tools = environment.from_string(tools_source)
            self.variables = find_undeclared_variables(environment.parse(source))
            """What the template looks up."""
            tool_variables = find_undeclared_variables(environment.parse(tools_source))
        except TemplateError as error:
            raise ValueError(f"the model's chat template is broken: {error}") from error
        self.supports_tools = "tools" in tool_variables
        """Whether there is a place for tools."""
        self.source = source if with_tools is None else source + with_tools
        """All of its source."""
        self.model_type = model_type
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source
        self._knows_null = _ASKS_FOR_NULL.search(self.source) is not None

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The text of bos_token, eos_token and others, by name."""
        return self._special_tokens

    def render(
        self,
        messages: object,
        add_generation_prompt: bool = True,
        options: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] = (),
        continue_final: bool = False,
    ) -> str:
        """The prompt of a chat; `options` become variables of the template.

        continue_final: end within the last message, which is the assistant's, for it to go on.
        Raises FieldError naming `messages`, whatever the template raises, or
        `continue_final_message`.
        """
        checked = self._checked(messages)
        mark = secrets.token_hex(16) if continue_final else ""
        if continue_final:
            last = checked[-1]
            if last["role"] != "assistant" or "tool_calls" in last:
                raise FieldError(
                    "continue_final_message",
                    "continue_final_message needs a last message that is a text of the assistant",
                )
            last["content"] += mark
        text = self._rendered(
            self._with_tools if tools else self._plain,
            {
                **self._special_tokens,
                **(options or {}),
                "messages": checked,
                "tools": list(tools) or None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            },
        )
        if not continue_final:
            return text
        text, found, _ = text.rpartition(mark)
        if not found:
            raise FieldError("messages", "the chat template does not show the last message")
        return text

    def _rendered(self, template: Template, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        deadline = time.monotonic() + MAX_SECONDS
        try:
            for piece in template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_TEXT or time.monotonic() > deadline:
                    _raise_exception("the chat is too large to be rendered")
        except Exception as error:  # a template's code may raise anything over odd messages
            raise FieldError("messages", f"the chat template refused them: {error}") from error
        return "".join(pieces)

    def _checked(self, messages: object) -> list[ChatMessage]:
        """The messages as this template expects them. Raises FieldError naming `messages`."""
        checked = normalize_messages(messages)
        for message in checked:
            # The newer name of the system role; templates drop or misplace a role they do not know.
            if message["role"] == "developer" and not self._knows_developer:
                message["role"] = "system"
            # Templates that do not ask would fail over null, or write it as a word.
            if message["content"] is None and not self._knows_null:
                message["content"] = ""
        return checked


def load_chat_template(folder: Path, file: Path | None = None) -> ChatTemplate | None:
    """The chat template of a model folder, or that of a file in its place; None where there is
    none.

    Raises ValueError where it is broken, OSError where the file cannot be read.
    """
    config = _read_object(folder / "tokenizer_config.json")
    given = None if file is None else {"default": file.read_text(encoding="utf-8")}
    sources = given or _template_sources(folder, config)
    if "default" not in sources:
        return None
    model_type = _read_object(folder / "config.json").get("model_type")
    typed = model_type if isinstance(model_type, str) else ""
    tokens = _special_tokens(folder, config)
    return ChatTemplate(sources["default"], tokens, sources.get("tool_use"), typed)


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the named special tokens of a tokenizer, which templates get as variables.

    special_tokens_map.json has precedence where tokenizer_config.json has no added_tokens_decoder,
    as older files do not; extra_special_tokens that are an object have names of their own.
    """
    settings = dict(config)
    if "added_tokens_decoder" not in config:
        settings |= _read_object(folder / "special_tokens_map.json")
    extra = settings.get("extra_special_tokens")
    named = {name: token for name, token in settings.items() if name.endswith("_token")}
    named |= extra if isinstance(extra, dict) else {}
    texts = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in named.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _template_sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the templates by name, from chat_template.jinja or else from JSON, and those of the
    folder additional_chat_templates; most models have the default one only."""
    additional = {
        file.stem: file.read_text(encoding="utf-8")
        for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    file = folder / "chat_template.jinja"
    if file.is_file():
        return additional | {"default": file.read_text(encoding="utf-8")}
    found = _read_object(folder / "chat_template.json").get("chat_template")
    found = found or config.get("chat_template")
    if isinstance(found, list):
        return {entry["name"]: entry["template"] for entry in found} | additional
    return additional | ({"default": found} if isinstance(found, str) else {})


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object from a file, empty where there is no file. Raises ValueError."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no JSON object")
    return found


def _to_json(
    value: Any,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
    ensure_ascii: bool = False,
) -> str:
    """JSON as templates expect it: Jinja's own filter would escape characters of HTML."""
    return json.dumps(
        value,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        ensure_ascii=ensure_ascii,
    )


def _raise_exception(message: str) -> NoReturn:
    """How a template refuses a chat."""
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    """The local date, for templates that tell the model what day it is."""
    return datetime.now().strftime(form)
