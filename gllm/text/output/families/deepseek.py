"""Tool calls of DeepSeek V3, R1 and V3.1: calls between markers, in a block of their own.

V3 and R1 write `function<sep>NAME`, a line end and the arguments as a fenced
block of JSON; V3.1 writes `NAME<sep>{..}`. Source: the models' chat templates.
"""

import re

from gllm.text.output import json_parser
from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.reader import ParserCoroutine, TextReader
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat, parse_marked_calls

BLOCK, BLOCK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
"""Markers around all calls."""
OPEN, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
"""Markers around a call."""
SEPARATOR = "<｜tool▁sep｜>"
"""Marker after the type of tool (V3, R1) or after the name (V3.1)."""
FENCE, FENCE_END = "```json", "```"
"""Lines around the arguments of V3 and R1."""
_WORD = re.compile(r"[^\s<]+")


def _parse_call(reader: TextReader, emitter: ToolCallEmitter, marker: str) -> ParserCoroutine[bool]:
    if marker == BLOCK and not (yield from reader.consume_next(OPEN)):
        return False
    name = yield from reader.read_while(_WORD)
    if not (yield from reader.consume_any(SEPARATOR)):
        return False
    yield from reader.skip_space()
    if (yield from reader.peek()) != "{":
        # The first word was the type of tool.
        name = yield from reader.read_while(_WORD)
        yield from reader.consume_next(FENCE)
        yield from reader.skip_space()
    if (yield from reader.peek()) != "{" or not emitter.start_call(name):
        return False
    if not (yield from json_parser.parse_value(reader, emitter.add_arguments)):
        return False
    for ending in (FENCE_END, CLOSE, BLOCK_END):
        yield from reader.consume_next(ending)
    return True


def _delimiters(template: str) -> ToolCallDelimiters:
    """Return the delimiters of V3 and R1 if the template contains fences, else those of V3.1."""
    if FENCE in template:
        before = f"{OPEN}function{SEPARATOR}NAME\n{FENCE}\n"
        return ToolCallDelimiters(before, f"\n{FENCE_END}{CLOSE}", BLOCK, "\n", BLOCK_END)
    return ToolCallDelimiters(f"{OPEN}NAME{SEPARATOR}", CLOSE, BLOCK, "", BLOCK_END)


FORMAT = ToolCallFormat(
    name="deepseek",
    parse=parse_marked_calls((BLOCK, OPEN), (CLOSE, BLOCK_END), _parse_call),
    markers=(BLOCK, BLOCK_END, OPEN, CLOSE, SEPARATOR),
    is_used_by=lambda template: BLOCK in template,
    delimiters=_delimiters,
    model_types=("deepseek_v3",),
)
