"""Tool calls written as a JSON list of objects after a marker."""

from collections.abc import Callable

from gllm.text.output import json_tool_call
from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.reader import SPACE, ParserCoroutine, TextReader
from gllm.text.output.tool_calls import ParseToolCalls, ToolCallEmitter, ToolCallFormat

ParseCall = Callable[[TextReader, ToolCallEmitter], ParserCoroutine[bool]]
"""Parser of one call of a list."""


def _parse_object(reader: TextReader, emitter: ToolCallEmitter) -> ParserCoroutine[bool]:
    yield from reader.skip_space()
    return (yield from json_tool_call.parse_json_call(reader, emitter))


def parse_call_list(
    reader: TextReader,
    emitter: ToolCallEmitter,
    marker: str,
    parse_call: ParseCall = _parse_object,
) -> ParserCoroutine[None]:
    """Parse the calls of a list; what is no call, and text after it, are content.

    Args:
        reader: Text after the opening bracket.
        emitter: Receives the events of the calls.
        marker: Text before the first call, already consumed.
        parse_call: Parser of one call; by default of an object with a name and arguments.
    """
    is_call = yield from emitter.try_call(parse_call(reader, emitter), marker)
    while is_call:
        separator = yield from reader.consume_next(",", "]")
        if separator != ",":
            break
        is_call = yield from emitter.try_call(parse_call(reader, emitter), separator)


def parse_marked_lists(
    opening: str, closing: str, parse_call: ParseCall = _parse_object
) -> ParseToolCalls:
    """Create a parser for a format with lists of calls, or single ones, between two markers.

    Args:
        opening: Marker before a list.
        closing: Marker after a list.
        parse_call: As in `parse_call_list`.
    """

    def parse(reader: TextReader, emitter: ToolCallEmitter) -> ParserCoroutine[None]:
        while marker := (yield from reader.consume_until((opening, closing), emitter.add_content)):
            if marker == closing:
                emitter.add_closing_marker(marker)
                continue
            blank = yield from reader.read_while(SPACE)
            bracket = yield from reader.consume_any("[")
            begin = f"{marker}{blank}{bracket}"
            if bracket:
                yield from parse_call_list(reader, emitter, begin, parse_call)
            else:
                yield from emitter.try_call(parse_call(reader, emitter), begin)

    return parse


def list_delimiters(marker: str, closing: str = "") -> ToolCallDelimiters:
    """Return the texts around the calls of a list.

    Args:
        marker: Marker before the list.
        closing: Marker after it, if there is one.
    """
    return ToolCallDelimiters(
        call_prefix='{"name": "NAME", "arguments": ',
        call_suffix="}",
        block_prefix=f"{marker}[",
        separator=", ",
        block_suffix=f"]{closing}",
    )


def list_format(
    name: str,
    opening: str,
    closing: str,
    shown: str,
    writes_closing: bool = True,
    model_types: tuple[str, ...] = (),
) -> ToolCallFormat:
    """Return the tool call format with a list of JSON objects between two markers.

    Args:
        name: Value of --tool-call-parser.
        opening: Marker before the list.
        closing: Marker after the list.
        shown: Text of the chat templates that use the format.
        writes_closing: False if models end an answer without the closing marker.
        model_types: Values of `model_type` in config.json.
    """
    delimiters = list_delimiters(opening, closing if writes_closing else "")
    return ToolCallFormat(
        name=name,
        parse=parse_marked_lists(opening, closing),
        markers=(opening, closing),
        is_used_by=lambda template: shown in template,
        delimiters=lambda template: delimiters,
        model_types=model_types,
    )
