"""An output of the model as what it means: reasoning, content, tool calls.

Owns the order of the parsers: reasoning is split off first, calls are found in what is left. Knows
nothing of tokens and of HTTP.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gllm.text.output.custom_input import CustomToolInputDecoder
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


@dataclass(frozen=True)
class OutputFormat:
    """What an answer may hold besides text."""

    reasoning: ReasoningTags | None = None
    within: bool = False
    """Whether the prompt has opened reasoning that the output goes on with."""
    calls: ToolCallFormat | None = None
    tools: Mapping[str, Schema] = field(default_factory=dict)
    """Schemas of arguments by name of the tool."""
    custom: frozenset[str] = frozenset()
    """Names of custom tools, whose input is free text."""
    is_restricted: bool = False
    """Whether only calls of `tools` are calls, whatever the family says."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that the parser has to see, should the vocabulary have them as special ones."""
        tags = self.reasoning
        return (
            *(() if tags is None else (tags.opening, tags.closing)),
            *(() if self.calls is None else self.calls.markers),
        )


PLAIN_TEXT = OutputFormat()
"""Nothing but text."""


class _Machine:
    """A parser and the text it reads."""

    def __init__(self, reader: TextReader, parser: ParserCoroutine[None]) -> None:
        self._reader = reader
        self._parser = parser
        next(parser, None)

    def feed(self, text: str) -> None:
        if text:
            self._reader.feed(text)
            next(self._parser, None)

    def end(self) -> None:
        self._reader.end()
        next(self._parser, None)


class OutputParser:
    """One choice's text in, events out. The events do not depend on how the text is cut, but for
    where they are cut themselves."""

    def __init__(self, form: OutputFormat) -> None:
        self._calls: ToolCallEmitter | None = None
        self._custom = form.custom
        self._inputs: dict[int, CustomToolInputDecoder] = {}
        """Of calls of custom tools, by index."""
        self._machines: list[_Machine] = []
        content: list[OutputEvent] = []
        self._sources = [content]
        """Where events come from, in the order of the text."""

        def answer(text: str) -> None:
            if text:
                content.append(ContentDelta(text))

        if form.calls is not None:
            reader = TextReader()
            family = form.calls
            only_known = family.only_known or form.is_restricted
            self._calls = ToolCallEmitter(reader, form.tools, only_known, family.new_id)
            calls = _Machine(reader, family.parse(reader, self._calls))
            self._machines.append(calls)
            self._sources = [self._calls.events]
            answer = calls.feed
        if form.reasoning is not None:
            reader = TextReader()
            splitter = ReasoningSplitter(form.reasoning, form.within, answer)
            split = _Machine(reader, splitter.split(reader))
            self._machines.insert(0, split)
            self._sources.insert(0, splitter.events)
            answer = split.feed
        self._feed = answer

    def push(self, text: str) -> list[OutputEvent]:
        """What more text brings."""
        self._feed(text)
        return self._take()

    def finish(self) -> list[OutputEvent]:
        """What was held back, when no more text comes."""
        for machine in self._machines:
            machine.end()
        if self._calls is not None:
            self._calls.finish()
        return self._take()

    def _take(self) -> list[OutputEvent]:
        """The events so far."""
        taken = [event for source in self._sources for event in source]
        for source in self._sources:
            source.clear()
        return merge_events(taken if not self._custom else [*map(self._as_custom, taken)])

    def _as_custom(self, event: OutputEvent) -> OutputEvent:
        """Return an event of a custom tool's call with its input for its arguments."""
        match event:
            case ToolCallStart(index, call_id, name) if name in self._custom:
                self._inputs[index] = CustomToolInputDecoder()
                return ToolCallStart(index, call_id, name, is_custom=True)
            case ToolCallArgumentsDelta(index, text) if index in self._inputs:
                return ToolCallArgumentsDelta(index, self._inputs[index].push(text))
            case _:
                return event
