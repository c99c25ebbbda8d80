"""Parse the output of a model into reasoning, content and tool calls.

Reasoning is split off first; tool calls are searched in the remaining text.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gllm.text.chat.tools import CUSTOM_INPUT_KEY
from gllm.text.output.events import (
    ContentDelta,
    OutputEvent,
    ToolCallArgumentsDelta,
    ToolCallStart,
    merge_events,
)
from gllm.text.output.grammar_builder import Schema
from gllm.text.output.reader import ParserCoroutine, TextReader
from gllm.text.output.reasoning import ReasoningSplitter, ReasoningTags
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat

_PREFIX = re.compile(rf'\s*{{\s*"{CUSTOM_INPUT_KEY}"\s*:\s*"')
"""Text before the input."""
_PREFIX_WITHOUT_SPACE = f'{{"{CUSTOM_INPUT_KEY}":"'
_SPACE = re.compile(r"\s+")
_UNIT = re.compile(
    r'[^"\\]+'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    r'|\\["\\/bfnrt]'
)
"""Part of a JSON string that can be decoded by itself."""
_LONE_SURROGATE = re.compile(
    r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])[0-9a-fA-F]{4})"
)
"""Half of a surrogate pair without the other half."""


class CustomToolInputDecoder:
    """Converts the streamed JSON arguments of a custom tool into its free-text input.

    Models write the input as an object with one string. Arguments of another form are not changed.
    """

    def __init__(self) -> None:
        self._pending = ""
        """Text that cannot be decoded yet."""
        self._prefix: list[str] = []
        """Text of the state `prefix`; joined once, because a model may write blanks for long."""
        self._visible_prefix = ""
        """The same without whitespace."""
        self._state = "prefix"
        """prefix, string, end or verbatim."""

    def push(self, text: str) -> str:
        """Add text of the arguments; return the new text of the input."""
        if self._state == "prefix":
            self._match_prefix(text)
        else:
            self._pending += text
        if self._state == "verbatim":
            text, self._pending = self._pending, ""
            return text
        return self._decode_string() if self._state == "string" else ""

    def _match_prefix(self, text: str) -> None:
        """Leave the state `prefix` once it is known whether the arguments have the usual form."""
        self._prefix.append(text)
        self._visible_prefix += _SPACE.sub("", text)
        is_complete = len(self._visible_prefix) >= len(_PREFIX_WITHOUT_SPACE)
        if not is_complete and _PREFIX_WITHOUT_SPACE.startswith(self._visible_prefix):
            return
        self._pending = "".join(self._prefix)
        match = _PREFIX.match(self._pending)
        self._state = "string" if match else "verbatim"
        self._pending = self._pending[match.end() if match else 0 :]

    def _decode_string(self) -> str:
        """Return the complete part of the pending string, decoded."""
        pieces: list[str] = []
        position = 0
        while position < len(self._pending):
            if self._pending[position] == '"':
                self._state = "end"
                break
            if match := _UNIT.match(self._pending, position):
                pieces.append(json.loads(f'"{match[0]}"'))
            elif match := _LONE_SURROGATE.match(self._pending, position):
                pieces.append("\ufffd")
            else:
                break
            position = match.end()
        self._pending = self._pending[position:]
        return "".join(pieces)


@dataclass(frozen=True)
class OutputFormat:
    """Description of how to parse a model's output: reasoning tags, tool call format and tools."""

    reasoning_tags: ReasoningTags | None = None
    """Tags of the reasoning section, None if reasoning is not split off."""
    starts_in_reasoning: bool = False
    """True if the prompt has opened a reasoning section that the output continues."""
    tool_call_format: ToolCallFormat | None = None
    """Format of tool calls, None if calls are not parsed."""
    tool_schemas: Mapping[str, Schema] = field(default_factory=dict)
    """JSON Schemas of arguments by name of the tool."""
    custom_tools: frozenset[str] = frozenset()
    """Names of custom tools, whose input is free text."""
    only_listed_tools: bool = False
    """True if only tools of `tool_schemas` can be called, in every format."""
    continues_reasoning: bool = False
    """True if the output continues the reasoning of a message: its leading space is part of it."""

    @property
    def has_channels(self) -> bool:
        """True if the parser of tool calls also splits off the reasoning."""
        tags, call_format = self.reasoning_tags, self.tool_call_format
        if tags is None or call_format is None:
            return False
        return call_format.has_channels and call_format.name == tags.name

    @property
    def end_tokens(self) -> tuple[str, ...]:
        """Tokens that end an answer beside those of the model's configuration."""
        return () if self.tool_call_format is None else self.tool_call_format.end_tokens

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that must be visible in the text to parse it."""
        markers: list[str] = []
        if self.reasoning_tags is not None:
            markers += self.reasoning_tags.tokens
        if self.tool_call_format is not None:
            markers += self.tool_call_format.markers
        return tuple(markers)


PLAIN_TEXT = OutputFormat()
"""Format of an output that is nothing but content."""


class _ParserRun:
    """A running parser and the text it reads."""

    def __init__(self, reader: TextReader, parser: ParserCoroutine[None]) -> None:
        self._reader = reader
        self._parser = parser
        next(parser, None)

    def feed(self, text: str) -> None:
        if text:
            self._reader.feed(text)
            next(self._parser, None)

    def close(self) -> None:
        self._reader.close()
        next(self._parser, None)


class OutputParser:
    """Parses the streamed output of one choice into content, reasoning and tool calls.

    The result does not depend on how the text is divided into chunks, except for where deltas end.
    """

    def __init__(self, output_format: OutputFormat) -> None:
        self._emitter: ToolCallEmitter | None = None
        self._custom_tools = output_format.custom_tools
        self._input_decoders: dict[int, CustomToolInputDecoder] = {}
        """Decoders of the calls of custom tools, by index of the call."""
        self._runs: list[_ParserRun] = []
        content: list[OutputEvent] = []
        self._event_lists = [content]
        """Lists that parsers append events to, in the order of the text."""

        def answer(text: str) -> None:
            if text:
                content.append(ContentDelta(text))

        tags, call_format = output_format.reasoning_tags, output_format.tool_call_format
        has_channels = output_format.has_channels
        if call_format is not None:
            reader = TextReader()
            self._emitter = ToolCallEmitter(
                reader,
                output_format.tool_schemas,
                call_format.only_known_tools or output_format.only_listed_tools,
                call_format.create_call_id,
                has_channels,
                has_channels and output_format.starts_in_reasoning,
            )
            calls = _ParserRun(reader, call_format.parse(reader, self._emitter))
            self._runs.append(calls)
            self._event_lists = [self._emitter.events]
            answer = calls.feed
        if tags is not None and not has_channels:
            reader = TextReader()
            splitter = ReasoningSplitter(
                tags, output_format.starts_in_reasoning, answer, output_format.continues_reasoning
            )
            split = _ParserRun(reader, splitter.parse(reader))
            self._runs.insert(0, split)
            self._event_lists.insert(0, splitter.events)
            answer = split.feed
        self._feed = answer

    def push(self, text: str) -> list[OutputEvent]:
        """Add text; return the events that it completes."""
        self._feed(text)
        return self._pop_events()

    def finish(self) -> list[OutputEvent]:
        """End the text; return the events of the buffered text."""
        for run in self._runs:
            run.close()
        if self._emitter is not None:
            self._emitter.finish()
        return self._pop_events()

    def _pop_events(self) -> list[OutputEvent]:
        """Return and clear the events so far."""
        events = [event for event_list in self._event_lists for event in event_list]
        for event_list in self._event_lists:
            event_list.clear()
        if self._custom_tools:
            events = [self._decode_custom_input(event) for event in events]
        return merge_events(events)

    def _decode_custom_input(self, event: OutputEvent) -> OutputEvent:
        """Return an event of a custom tool's call with its input in place of its arguments."""
        match event:
            case ToolCallStart(index, call_id, name) if name in self._custom_tools:
                self._input_decoders[index] = CustomToolInputDecoder()
                return ToolCallStart(index, call_id, name, is_custom=True)
            case ToolCallArgumentsDelta(index, text) if index in self._input_decoders:
                return ToolCallArgumentsDelta(index, self._input_decoders[index].push(text))
            case _:
                return event
