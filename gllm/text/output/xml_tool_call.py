"""Tool calls written as elements: one per function, with one per parameter inside.

Qwen3-Coder, Seed-OSS, MiniMax M2 and DeepSeek V3.2 differ only in their tags.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.reader import ParserCoroutine, TextReader, TextSink
from gllm.text.output.tagged_tool_call import TaggedArguments, tagged_arguments_expression
from gllm.text.output.tool_calls import (
    ParseToolCalls,
    ToolCallEmitter,
    ToolCallFormat,
    parse_marked_calls,
)


@dataclass(frozen=True)
class XmlTags:
    """Tags of a format whose calls are elements.

    A value also ends where a line begins with the tag after its missing end tag.
    """

    blocks: tuple[str, ...]
    """Tags before calls, which models sometimes omit; the first one is written."""
    block_ends: tuple[str, ...]
    """Tags after calls, in the order of `blocks`."""
    function: str
    """Beginning of a function's tag, before its name."""
    function_end: str
    parameter: str
    """Beginning of a parameter's tag, before its name."""
    parameter_end: str
    name_end: str = ">"
    """Text after the name of a function."""
    key_ends: tuple[str, ...] = (">",)
    """Texts after the name of a parameter. If there are several, the first one declares the value
    as a string."""
    has_value_lines: bool = False
    """True if a value stands on lines of its own."""
    has_calls_in_block: bool = False
    """True if a block contains all calls, False if each call has its own."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Tags that are tokens of some vocabularies."""
        return (*self.blocks, *self.block_ends)


class XmlCallParser:
    """Parser of a single call for the tags of a format.

    Args:
        tags: Tags of the format.
    """

    def __init__(self, tags: XmlTags) -> None:
        self._tags = tags
        self._next_tags = (tags.parameter, tags.function_end, *tags.block_ends)
        ends = (f"\n{tags.parameter_end}",) if tags.has_value_lines else ()
        lines = (f"\n{tag}" for tag in self._next_tags)
        self._value_stops = (*ends, tags.parameter_end, *lines)
        self._name = re.compile(f"[^<>\n{re.escape(tags.name_end[0])}]+")

    def parse(
        self, reader: TextReader, emitter: ToolCallEmitter, marker: str
    ) -> ParserCoroutine[bool]:
        """Parse the call after a marker, which is the tag of a block or of a function."""
        tags = self._tags
        if marker != tags.function and not (yield from reader.consume_next(tags.function)):
            return False
        name = yield from reader.read_while(self._name)
        if not (yield from reader.consume_any(tags.name_end)):
            return False
        if not emitter.start_call(name.strip()):
            return False
        arguments = TaggedArguments(emitter, name.strip())
        tag = yield from reader.consume_next(*self._next_tags)
        while tag == tags.parameter:
            key = (yield from reader.read_while(self._name)).strip()
            key_end = yield from reader.consume_any(*tags.key_ends)
            if not key or not key_end:
                return False
            is_string = len(tags.key_ends) > 1 and key_end == tags.key_ends[0]
            end = yield from arguments.parse(key, partial(self._parse_value, reader), is_string)
            if not end:
                return False
            tag = end.strip()
            if tag == tags.parameter_end:
                tag = yield from reader.consume_next(*self._next_tags)
        if tag:
            arguments.finish()
        if tag == tags.function_end:
            yield from reader.consume_next(*tags.block_ends)
        return bool(tag)

    def _parse_value(self, reader: TextReader, sink: TextSink) -> ParserCoroutine[str]:
        if self._tags.has_value_lines:
            yield from reader.consume_any("\n")
        return (yield from reader.consume_until(self._value_stops, sink))


def parse_xml_calls(tags: XmlTags) -> ParseToolCalls:
    """Return the parser of a format with these tags."""
    call = XmlCallParser(tags)
    return parse_marked_calls((*tags.blocks, tags.function), tags.block_ends, call.parse)


def xml_delimiters(tags: XmlTags) -> Callable[[str], ToolCallDelimiters]:
    """Return a function that returns the texts around the calls of a format with these tags."""
    line = "\n" if tags.has_value_lines else ""
    block, block_end = f"{tags.blocks[0]}\n", tags.block_ends[0]
    per_call = ("", "") if tags.has_calls_in_block else (block, block_end)
    arguments = partial(
        tagged_arguments_expression,
        start_tag=f"{tags.parameter}KEY{tags.key_ends[-1]}{line}",
        string_start_tag=f"{tags.parameter}KEY{tags.key_ends[0]}{line}",
        end_tag=f"{line}{tags.parameter_end}",
        separator="\n",
    )
    delimiters = ToolCallDelimiters(
        call_prefix=f"{per_call[0]}{tags.function}NAME{tags.name_end}\n",
        call_suffix=f"{tags.function_end}\n{per_call[1]}",
        block_prefix=block if tags.has_calls_in_block else "",
        separator="" if tags.has_calls_in_block else "\n",
        block_suffix=block_end if tags.has_calls_in_block else "",
        arguments_rule=arguments,
    )
    return lambda template: delimiters


def xml_format(
    name: str, tags: XmlTags, shown: str, model_types: tuple[str, ...] = ()
) -> ToolCallFormat:
    """Return the tool call format with these tags.

    Args:
        name: Value of --tool-call-parser.
        tags: Tags of the format.
        shown: Text of the chat templates that use the format.
        model_types: Values of `model_type` in config.json.
    """
    return ToolCallFormat(
        name=name,
        parse=parse_xml_calls(tags),
        markers=tags.markers,
        is_used_by=lambda template: shown in template,
        delimiters=xml_delimiters(tags),
        model_types=model_types,
    )
