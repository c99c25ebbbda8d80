"""From what a family's parser finds to events.

Owns ids and indices of calls, and what counts as content: whitespace in front of a call and behind
the last one does not, the text of a call that broke does. Knows nothing of formats.
"""

import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gllm.text.output.events import (
    ContentDelta,
    OutputEvent,
    ToolCallAborted,
    ToolCallArgumentsDelta,
    ToolCallStart,
)
from gllm.text.output.grammar_builder import Schema, ToolCallDelimiters
from gllm.text.output.reader import ParserCoroutine, TextReader, TrailingSpaceFilter

ToolSchemas = Mapping[str, Schema]
"""Schemas of arguments by name of the tool."""

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def new_call_id() -> str:
    """An id as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


def new_short_call_id() -> str:
    """Nine letters and digits, which is what Mistral's templates take."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class ToolCallEmitter:
    """Takes what a parser finds. At most one call is open at a time.

    only_known: whether a call of a tool that the request does not have is none.
    """

    def __init__(
        self,
        reader: TextReader,
        tools: ToolSchemas,
        only_known: bool,
        new_id: Callable[[], str],
    ) -> None:
        self.tools = tools
        self.events: list[OutputEvent] = []
        self._reader = reader
        self._only_known = only_known
        self._new_id = new_id
        self._begun = 0
        self._done = 0
        self._open = False
        self._may_close = False
        """Whether a closing marker may still belong to the last call."""
        self._shown = TrailingSpaceFilter(lambda text: self.events.append(ContentDelta(text)))

    def content(self, text: str) -> None:
        """More content."""
        self._shown.push(text)

    def start(self, name: str) -> bool:
        """A call begins; false for a name that no tool has."""
        known = name in self.tools if self._only_known else _NAME.fullmatch(name)
        if not known:
            return False
        self.events.append(ToolCallStart(self._begun, self._new_id(), name))
        self._begun += 1
        self._open = True
        return True

    def arguments(self, text: str) -> None:
        """More of the open call's arguments."""
        if text:
            self.events.append(ToolCallArgumentsDelta(self._begun - 1, text))

    def attempt(self, call: ParserCoroutine[bool], marker: str = "") -> ParserCoroutine[bool]:
        """Whether a parser finds a call behind the marker. If not, its text is content."""
        self._reader.keep(marker)
        good = yield from call
        text = self._reader.kept()
        if good:
            self._shown.drop()
            self._done += 1
        else:
            if self._open:
                self.events.append(ToolCallAborted(self._begun - 1))
            self.content(text)
        self._open = False
        self._may_close = good
        return good

    def closing(self, marker: str) -> None:
        """A closing marker by itself: the end of a call with something wrong behind its arguments,
        or content."""
        if not self._may_close:
            self.content(marker)
        self._may_close = False

    def finish(self) -> None:
        """No more text comes."""
        if not self._done:
            self._shown.flush()


Parse = Callable[[TextReader, ToolCallEmitter], ParserCoroutine[None]]


@dataclass(frozen=True)
class ToolCallFormat:
    """How the models of a family write tool calls."""

    name: str
    parse: Parse
    """The parser of an answer; what it leaves is content."""
    markers: tuple[str, ...]
    """Tokens that the parser has to see, should the vocabulary have them as special ones."""
    written_by: Callable[[str], bool]
    """Whether a chat template, given by its source, shows this format."""
    written: Callable[[str], ToolCallDelimiters]
    """How calls look, by the chat template's source."""
    model_types: tuple[str, ...] = ()
    """Of config.json, for templates that show no format that is known."""
    only_known: bool = False
    """Whether only the request's own tools can be called: text without markers may look like a
    call."""
    new_id: Callable[[], str] = new_call_id
