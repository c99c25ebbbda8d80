"""Tool calls of Kimi K2: an id with the tool's name and a JSON object, between markers.

A call is `<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{..}<|tool_call_end|>`
in a section of its own. The id is that of the call: the template writes it into the prompt of the
next turn. Source: the models' chat templates.
"""

import re

from gllm.text.output import json_parser
from gllm.text.output.grammar_builder import (
    GrammarBuilder,
    Schema,
    ToolCallDelimiters,
    add_json_arguments_rule,
)
from gllm.text.output.reader import ParserCoroutine, TextReader
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat, parse_marked_calls

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
"""Markers around all calls."""
OPEN, ARGUMENTS, CLOSE = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
"""Markers before the id, before the arguments and after a call."""
_WORD = re.compile(r"[^\s<]+")
_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::(?P<index>\d{1,9}))?")


def _parse_call(reader: TextReader, emitter: ToolCallEmitter, marker: str) -> ParserCoroutine[bool]:
    if marker == SECTION and not (yield from reader.consume_next(OPEN)):
        return False
    yield from reader.skip_space()
    call_id = yield from reader.read_while(_WORD)
    match = _ID.fullmatch(call_id)
    if match is None or not (yield from reader.consume_next(ARGUMENTS)):
        return False
    yield from reader.skip_space()
    if (yield from reader.peek()) != "{":
        return False
    if not emitter.start_call(match["name"], call_id if match["index"] else ""):
        return False
    if not (yield from json_parser.parse_value(reader, emitter.add_arguments)):
        return False
    for ending in (CLOSE, SECTION_END):
        yield from reader.consume_next(ending)
    return True


def _arguments_rule(grammar: GrammarBuilder, schema: Schema, is_strict: bool) -> str:
    """Return the expression of the index of a call and its arguments."""
    index = grammar.add_rule("/[0-9]{1,3}/")
    arguments = add_json_arguments_rule(grammar, schema, is_strict)
    return f"{index} {grammar.literal(ARGUMENTS)} {arguments}"


FORMAT = ToolCallFormat(
    name="kimi_k2",
    parse=parse_marked_calls((SECTION, OPEN), (CLOSE, SECTION_END), _parse_call),
    markers=(SECTION, SECTION_END, OPEN, ARGUMENTS, CLOSE),
    is_used_by=lambda template: ARGUMENTS in template,
    delimiters=lambda template: ToolCallDelimiters(
        call_prefix=f"{OPEN}functions.NAME:",
        call_suffix=CLOSE,
        block_prefix=SECTION,
        block_suffix=SECTION_END,
        arguments_rule=_arguments_rule,
    ),
    model_types=("kimi_k2", "kimi_k25", "kimi_linear"),
)
