"""Harmony, the format of gpt-oss: an output is a sequence of messages in channels.

A message is `<|channel|>NAME<|message|>TEXT<|end|>`; further ones start with `<|start|>assistant`.
The channel `analysis` is reasoning, `final` is the answer. A tool call is a message in `commentary`
with a recipient, `to=functions.NAME`, before or after the channel, and ends with `<|call|>`;
without a recipient it is said to the user before a call. Source: OpenAI, "OpenAI Harmony Response
Format" (2025), and the models' chat template.
"""

import re
from types import MappingProxyType

from gllm.text.output import json_parser
from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.reader import ParserCoroutine, TextReader, TextSink
from gllm.text.output.reasoning import ReasoningTags
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
"""Markers before a message's role, its channel and its text."""
CONSTRAIN = "<|constrain|>"
"""Marker before the type of a message's text, such as json."""
ENDS = ("<|end|>", "<|call|>", "<|return|>")
"""Markers behind a message, a tool call and the last message."""
RECIPIENT = " to="
"""Text before the recipient in a header; the prompt ends before it."""
FUNCTIONS = "functions."
"""Beginning of recipients that are the request's tools."""
_RECIPIENT_NAME = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
MESSAGE_SEPARATOR = "\n\n"
"""Text between two messages that are joined."""


class _Section:
    """Joins the texts of all messages of one kind: reasoning or content."""

    def __init__(self, sink: TextSink) -> None:
        self._sink = sink
        self._has_text = False
        self._needs_separator = False

    def start_message(self) -> None:
        """Start another message; the text before it, if any, is separated from its text."""
        self._needs_separator = self._has_text

    def push(self, text: str) -> None:
        """Add text of the current message."""
        if not text:
            return
        if self._needs_separator:
            self._sink(MESSAGE_SEPARATOR)
        self._has_text, self._needs_separator = True, False
        self._sink(text)


class _Parser:
    """Parser of one output."""

    def __init__(self, reader: TextReader, emitter: ToolCallEmitter) -> None:
        self._reader = reader
        self._emitter = emitter
        self._content = _Section(emitter.add_content)
        self._reasoning = self._content
        if emitter.splits_reasoning:
            self._reasoning = _Section(emitter.add_reasoning)

    def parse(self) -> ParserCoroutine[None]:
        """Parse all messages; text outside of messages is content."""
        reader = self._reader
        if self._emitter.starts_in_reasoning:
            begin = yield from self._parse_text(self._reasoning)
        else:
            begin = yield from reader.consume_any(RECIPIENT)
        while True:
            while begin:
                begin = yield from self._parse_message(begin)
            stops = (START, CHANNEL, *ENDS)
            begin = yield from reader.consume_until(stops, self._content.push)
            if not begin:
                return
            if begin in ENDS:
                self._emitter.add_closing_marker(begin)
                begin = ""

    def _parse_message(self, begin: str) -> ParserCoroutine[str]:
        """Parse a message whose header begins with `begin`; return the marker of the next one.

        The result is empty if an end marker or no message follows.
        """
        header = [begin]
        stop = yield from self._reader.consume_until((MESSAGE, START, *ENDS), header.append)
        text = "".join(header)
        if stop != MESSAGE:
            self._content.push(text + (stop if stop in ENDS else ""))
            return stop if stop == START else ""
        recipient = _RECIPIENT_NAME.search(text)
        name = recipient[1] if recipient else ""
        if name.startswith(FUNCTIONS) or name in self._emitter.tool_schemas:
            name = name.removeprefix(FUNCTIONS)
            yield from self._emitter.try_call(self._parse_call(name), text + MESSAGE)
            return ""
        channel = _CHANNEL_NAME.search(text)
        is_reasoning = channel is not None and channel[1] == "analysis"
        section = self._reasoning if is_reasoning else self._content
        section.start_message()
        return (yield from self._parse_text(section))

    def _parse_text(self, section: _Section) -> ParserCoroutine[str]:
        """Parse the text of a message; return the marker of the next one if no end precedes it."""
        stop = yield from self._reader.consume_until((START, *ENDS), section.push)
        if stop in ENDS:
            yield from self._reader.skip_space()
        return stop if stop == START else ""

    def _parse_call(self, name: str) -> ParserCoroutine[bool]:
        """Parse the arguments of a call, and the marker behind them."""
        reader = self._reader
        yield from reader.skip_space()
        if (yield from reader.peek()) != "{" or not self._emitter.start_call(name):
            return False
        if not (yield from json_parser.parse_value(reader, self._emitter.add_arguments)):
            return False
        if (yield from reader.consume_next(*ENDS)):
            yield from reader.skip_space()
        return True


FORMAT = ToolCallFormat(
    name="harmony",
    parse=lambda reader, emitter: _Parser(reader, emitter).parse(),
    markers=(START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS),
    is_used_by=lambda template: f"{CHANNEL}commentary" in template,
    # The model ends its answer with a call.
    delimiters=lambda template: ToolCallDelimiters(
        call_prefix=f"{CHANNEL}commentary to={FUNCTIONS}NAME {CONSTRAIN}json{MESSAGE}",
        call_suffix="",
        allows_parallel=False,
    ),
    model_types=("gpt_oss",),
    has_channels=True,
    end_tokens=ENDS[1:],
    content_prefix=f"{CHANNEL}final{MESSAGE}",
)
REASONING = ReasoningTags(
    "harmony",
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant",
    efforts=MappingProxyType(
        {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high"}
        | {"max": "high"}
    ),
)
