"""Chat messages to the text a model was trained on, by the Jinja template it ships.

Owns the messages' schema, the sandbox the template runs in and its limits. Knows nothing of tokens
and of HTTP.
"""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gllm.config import FieldError

ROLES = ("system", "developer", "user", "assistant")
MAX_MESSAGES = 4096
MAX_TEXT = 32 * 2**20
"""Characters a rendered chat may have."""
MAX_SECONDS = 10.0
"""Time a rendering may take."""


class GenerationTag(Extension):
    """`{% generation %}`: marks the assistant's part for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares a plain set)

    def parse(self, parser: Parser) -> nodes.Node:
        """The body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A compiled chat template. Raises ValueError where its source is no template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the model's chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: object,
        add_generation_prompt: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt of a chat; `options` become variables of the template.

        Raises FieldError naming `messages`, whatever the template raises.
        """
        variables: dict[str, Any] = {
            **self._special_tokens,
            **(options or {}),
            "messages": self._checked(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        size = 0
        deadline = time.monotonic() + MAX_SECONDS
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_TEXT or time.monotonic() > deadline:
                    _raise_exception("the chat is too large to be rendered")
        except Exception as error:  # a template's code may raise anything over odd messages
            raise FieldError("messages", f"the chat template refused them: {error}") from error
        return "".join(pieces)

    def _checked(self, messages: object) -> list[dict[str, Any]]:
        """The messages as templates expect them. Raises FieldError naming `messages`."""
        if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
            raise FieldError("messages", f"messages has to be a list of 1 to {MAX_MESSAGES}")
        checked = [_checked_message(i, message) for i, message in enumerate(messages)]
        if not self._knows_developer:
            # The newer name of the system role; templates drop or misplace a role they do not know.
            for message in checked:
                if message["role"] == "developer":
                    message["role"] = "system"
        return checked


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a model folder, None where it has none.

    Raises ValueError where it is broken.
    """
    config = _read_object(folder / "tokenizer_config.json")
    source = _template_source(folder, config)
    if source is None:
        return None
    special_tokens = {}
    for name, token in config.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            special_tokens[name] = text
    return ChatTemplate(source, special_tokens)


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """The template's text from the first place that has it."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = _read_object(folder / "chat_template.json").get("chat_template")
    found = found or config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found if isinstance(found, str) else None


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object from a file, empty where there is no file. Raises ValueError."""
    if not file.is_file():
        return {}
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no JSON object")
    return found


def _checked_message(index: int, message: object) -> dict[str, Any]:
    """A copy of one message, its content as text. Raises FieldError naming `messages`."""

    def refuse(why: str) -> NoReturn:
        raise FieldError("messages", f"messages[{index}] {why}")

    if not isinstance(message, dict):
        refuse("has to be an object")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        refuse(f"has to have a role of {', '.join(ROLES)}")
    if message.get("tool_calls"):
        refuse("has tool_calls, which this server does not support")
    if isinstance(content, list):
        content = _joined(content)
    if not isinstance(content, str):
        refuse("has to have a content that is a string or a list of parts of type text")
    return {**message, "content": content}


def _joined(parts: Sequence[object]) -> str | None:
    """The text of content parts, one per line; None where a part is not text."""
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            return None
        text = part.get("text")
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "\n".join(texts)


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
