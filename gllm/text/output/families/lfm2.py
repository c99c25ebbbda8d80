"""Tool calls of LFM2: Python calls in a list, between markers.

`<|tool_call_start|>[NAME(KEY=VALUE, ..), ..]<|tool_call_end|>`, with literals of Python as values.
Source: the models' chat templates.
"""

import json
import re

from gllm.text.output import json_tool_call
from gllm.text.output.argument_schemas import ArgumentSchemas
from gllm.text.output.grammar_builder import (
    GrammarBuilder,
    Schema,
    ToolCallDelimiters,
    separated_expression,
)
from gllm.text.output.json_list_tool_call import parse_marked_lists
from gllm.text.output.literal_parser import PYTHON, parse_literal
from gllm.text.output.reader import ParserCoroutine, TextReader
from gllm.text.output.tagged_tool_call import json_rule
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
"""Markers around the list."""
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
_KEY = re.compile(r"[^\s=(),\"']+")


def _parse_call(reader: TextReader, emitter: ToolCallEmitter) -> ParserCoroutine[bool]:
    yield from reader.skip_space()
    if (yield from reader.peek()) == "{":
        # The system message may request JSON.
        return (yield from json_tool_call.parse_json_call(reader, emitter))
    name = yield from reader.read_while(_NAME)
    if not (yield from reader.consume_any("(")) or not emitter.start_call(name):
        return False
    lead = "{"
    end = yield from reader.consume_next(")")
    while not end:
        yield from reader.skip_space()
        key = yield from reader.read_while(_KEY)
        if not key or not (yield from reader.consume_next("=")):
            return False
        emitter.add_arguments(f"{lead}{json.dumps(key, ensure_ascii=False)}: ")
        if not (yield from parse_literal(reader, emitter.add_arguments, PYTHON)):
            return False
        lead = ", "
        separator = yield from reader.consume_next(",", ")")
        if not separator:
            return False
        end = separator if separator == ")" else (yield from reader.consume_next(")"))
    emitter.add_arguments("}" if lead == ", " else "{}")
    return True


def _arguments_rule(grammar: GrammarBuilder, schema: Schema, is_strict: bool) -> str:
    """Return the expression of the arguments, whose values are JSON except for booleans."""
    arguments = ArgumentSchemas(schema)
    members = []
    for name, is_required in arguments.names.items():
        if arguments.find_types(name) == {"boolean"}:
            value = '("True" | "False")'
        else:
            value = json_rule(grammar, schema, arguments.find(name), "")
        members.append((f"{grammar.literal(f'{name}=')} {value}", is_required))
    return separated_expression(grammar, members, ", ")


FORMAT = ToolCallFormat(
    name="lfm2",
    parse=parse_marked_lists(OPEN, CLOSE, _parse_call),
    markers=(OPEN, CLOSE),
    is_used_by=lambda template: OPEN in template or "<|tool_list_start|>" in template,
    delimiters=lambda template: ToolCallDelimiters(
        call_prefix="NAME(",
        call_suffix=")",
        block_prefix=f"{OPEN}[",
        separator=", ",
        block_suffix=f"]{CLOSE}",
        arguments_rule=_arguments_rule,
    ),
    model_types=("lfm2", "lfm2_moe"),
)
