"""Tool calls as events, and the interface of the formats in `families/`.

Assigns ids and indices of calls and decides which text is content: whitespace before a call and
after the last one is not, the text of an aborted call is.
"""

import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gllm.text.output.argument_schemas import ArgumentSchemas
from gllm.text.output.events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCallAborted,
    ToolCallArgumentsDelta,
    ToolCallStart,
)
from gllm.text.output.grammar_builder import Schema, ToolCallDelimiters
from gllm.text.output.reader import ParserCoroutine, TextReader, TrailingSpaceFilter

ToolSchemas = Mapping[str, Schema]
"""JSON Schemas of arguments by name of the tool."""

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def new_call_id() -> str:
    """Return a new random id of a tool call, `call_...` as OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


def new_short_call_id() -> str:
    """Return a new tool call id of nine letters and digits, as Mistral's chat templates require."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class ToolCallEmitter:
    """Collects the content and tool call events that a parser of a model output emits.

    Assigns ids and indices to the calls.

    Args:
        reader: Text of the output that the parser reads.
        tool_schemas: JSON Schemas of the request's tools.
        only_known_tools: Treat calls of other tools as content.
        create_call_id: Returns a new id.
        splits_reasoning: Reasoning is separated from the content, in formats with channels.
        starts_in_reasoning: The output begins inside the reasoning.
    """

    def __init__(
        self,
        reader: TextReader,
        tool_schemas: ToolSchemas,
        only_known_tools: bool,
        create_call_id: Callable[[], str],
        splits_reasoning: bool = False,
        starts_in_reasoning: bool = False,
    ) -> None:
        self.tool_schemas = tool_schemas
        self.splits_reasoning = splits_reasoning
        self.starts_in_reasoning = starts_in_reasoning
        self._argument_schemas: dict[str, ArgumentSchemas] = {}
        self.events: list[OutputEvent] = []
        """Events so far; the reader of the events clears the list."""
        self._reader = reader
        self._only_known_tools = only_known_tools
        self._create_call_id = create_call_id
        self._num_started = 0
        self._num_finished = 0
        self._is_open = False
        self._accepts_closing_marker = False
        """True if a closing marker may still belong to the last call."""
        self._content = TrailingSpaceFilter(lambda text: self.events.append(ContentDelta(text)))
        self._reasoning = TrailingSpaceFilter(lambda text: self.events.append(ReasoningDelta(text)))

    def add_content(self, text: str) -> None:
        """Add text to the content."""
        self._content.push(text)

    def add_reasoning(self, text: str) -> None:
        """Add text to the reasoning."""
        self._reasoning.push(text)

    def find_argument_schemas(self, name: str) -> ArgumentSchemas:
        """Return the schemas of a tool's arguments; those of an unknown tool restrict nothing."""
        if name not in self.tool_schemas:
            return ArgumentSchemas({})
        if name not in self._argument_schemas:
            self._argument_schemas[name] = ArgumentSchemas(self.tool_schemas[name])
        return self._argument_schemas[name]

    def start_call(self, name: str, call_id: str = "") -> bool:
        """Start a tool call; return False if no tool can have the name.

        Args:
            name: Name of the tool.
            call_id: Id of the call in formats that have ids; empty for a new one.
        """
        is_known = name in self.tool_schemas if self._only_known_tools else _NAME.fullmatch(name)
        if not is_known:
            return False
        self.events.append(
            ToolCallStart(self._num_started, call_id or self._create_call_id(), name)
        )
        self._num_started += 1
        self._is_open = True
        return True

    def add_arguments(self, text: str) -> None:
        """Add text to the arguments of the open call."""
        if text:
            self.events.append(ToolCallArgumentsDelta(self._num_started - 1, text))

    def try_call(self, parser: ParserCoroutine[bool], marker: str = "") -> ParserCoroutine[bool]:
        """Run the parser of one call; if it fails, the text of the call becomes content.

        Args:
            parser: Returns whether there is a call.
            marker: The marker before the call, already consumed.

        Returns:
            True if there is a call.
        """
        self._reader.start_recording(marker)
        is_call = yield from parser
        text = self._reader.stop_recording()
        if is_call:
            self._content.drop()
            self._num_finished += 1
        else:
            if self._is_open:
                self.events.append(ToolCallAborted(self._num_started - 1))
            self.add_content(text)
        self._is_open = False
        self._accepts_closing_marker = is_call
        return is_call

    def add_closing_marker(self, marker: str) -> None:
        """Handle a closing marker that does not directly follow a call.

        It ends a call with invalid text after its arguments; without such a call it is content.
        """
        if not self._accepts_closing_marker:
            self.add_content(marker)
        self._accepts_closing_marker = False

    def finish(self) -> None:
        """End the output and emit the buffered whitespace if there was no call."""
        if not self._num_finished:
            self._content.flush()


ParseToolCalls = Callable[[TextReader, ToolCallEmitter], ParserCoroutine[None]]
"""Parser of an output into content and tool calls."""


def parse_marked_calls(
    openings: tuple[str, ...],
    closings: tuple[str, ...],
    parse_call: Callable[[TextReader, ToolCallEmitter, str], ParserCoroutine[bool]],
) -> ParseToolCalls:
    """Create a parser for a format in which a marker text precedes each tool call.

    Args:
        openings: Markers before a call.
        closings: Markers after a call, which may also occur without one.
        parse_call: Parses a call; its last argument is the marker before it.
    """

    def parse(reader: TextReader, emitter: ToolCallEmitter) -> ParserCoroutine[None]:
        stops = (*openings, *closings)
        while marker := (yield from reader.consume_until(stops, emitter.add_content)):
            if marker in openings:
                yield from emitter.try_call(parse_call(reader, emitter, marker), marker)
            else:
                emitter.add_closing_marker(marker)

    return parse


@dataclass(frozen=True)
class ToolCallFormat:
    """Tool call format of a model family: its parser, its grammar and how to recognize it."""

    name: str
    """Value of --tool-call-parser."""
    parse: ParseToolCalls
    """Parser of an answer; text that belongs to no call is content."""
    markers: tuple[str, ...]
    """Tokens that the parser has to see even if they are special tokens of the vocabulary."""
    is_used_by: Callable[[str], bool]
    """Returns True if the source of a chat template uses this format."""
    delimiters: Callable[[str], ToolCallDelimiters]
    """Returns the texts around calls for the source of a chat template."""
    model_types: tuple[str, ...] = ()
    """Values of `model_type` in config.json, for chat templates that show no known format."""
    only_known_tools: bool = False
    """True if only the request's own tools can be called: text without markers may look like a
    call."""
    create_call_id: Callable[[], str] = new_call_id
    """Returns a new id of a call."""
    has_channels: bool = False
    """True if outputs are messages in channels, so that the parser also finds the reasoning and
    reads outputs without tools; `reasoning_tags` of the same name select it."""
    end_tokens: tuple[str, ...] = ()
    """Tokens that end an answer, though the model's configuration may not say so."""
    content_prefix: str = ""
    """Text before the answer in grammars."""
