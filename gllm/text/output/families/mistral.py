"""Mistral: `[TOOL_CALLS][{"name": .., "arguments": {..}}, ..]` or `[TOOL_CALLS]NAME[ARGS]{..}`.

Owns both formats: what follows the marker tells which it is. Source: the models' chat templates.
"""

import re

from gllm.text.output import json_parser, json_tool_call
from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.reader import ParserCoroutine, TextReader, discard
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat, new_short_call_id

MARKER, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")


def _parse(reader: TextReader, calls: ToolCallEmitter) -> ParserCoroutine[None]:
    while marker := (yield from reader.until((MARKER,), calls.content)):
        bracket = yield from reader.starts("[", " [")
        call = _object if bracket else _single
        good = yield from calls.attempt(call(reader, calls), marker + bracket)
        while good and bracket:
            yield from reader.space()
            separator = yield from reader.starts(",", "]")
            if separator != ",":
                break
            good = yield from calls.attempt(_object(reader, calls), separator)


def _object(reader: TextReader, calls: ToolCallEmitter) -> ParserCoroutine[bool]:
    yield from reader.space()
    return (yield from json_tool_call.parse_json_call(reader, calls))


def _single(reader: TextReader, calls: ToolCallEmitter) -> ParserCoroutine[bool]:
    yield from reader.space()
    if (yield from reader.peek()) == "{":
        return (yield from _object(reader, calls))
    name: list[str] = []
    yield from reader.word(_NAME, name.append)
    if (yield from reader.starts(ID)):
        yield from reader.word(_NAME, discard)
    yield from reader.starts(ARGUMENTS)
    yield from reader.space()
    if (yield from reader.peek()) != "{" or not calls.start("".join(name)):
        return False
    return (yield from json_parser.parse_value(reader, calls.arguments))


def _written(template: str) -> ToolCallDelimiters:
    """The newer format where the template shows it."""
    if ARGUMENTS in template:
        return ToolCallDelimiters(before=f"{MARKER}NAME{ARGUMENTS}", after="")
    return ToolCallDelimiters(
        before='{"name": "NAME", "arguments": ',
        after="}",
        opening=f"{MARKER}[",
        between=", ",
        closing="]",
    )


FAMILY = ToolCallFormat(
    name="mistral",
    parse=_parse,
    markers=(MARKER, ID, ARGUMENTS),
    written_by=lambda template: MARKER in template,
    written=_written,
    model_types=("mistral", "mixtral", "mistral3", "ministral"),
    new_id=new_short_call_id,
)
