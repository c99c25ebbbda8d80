"""DeepSeek V3, R1, V3.1: calls between markers, in a block of their own.

Owns both formats. V3 and R1 write `function<sep>NAME`, a line end and the arguments as a fenced
block of JSON; V3.1 writes `NAME<sep>{..}`. Source: the models' chat templates.
"""

import re

from gllm.text.output import json_parser
from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.reader import ParserCoroutine, TextReader
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat

BLOCK, BLOCK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE, FENCE_END = "```json", "```"
_WORD = re.compile(r"[^\s<]+")


def _parse(reader: TextReader, calls: ToolCallEmitter) -> ParserCoroutine[None]:
    stops = (BLOCK, OPEN, CLOSE, BLOCK_END)
    while marker := (yield from reader.until(stops, calls.content)):
        if marker in (BLOCK, OPEN):
            yield from calls.attempt(_call(reader, calls, marker), marker)
        else:
            calls.closing(marker)


def _call(reader: TextReader, calls: ToolCallEmitter, marker: str) -> ParserCoroutine[bool]:
    if marker == BLOCK:
        yield from reader.space()
        if not (yield from reader.starts(OPEN)):
            return False
    first: list[str] = []
    yield from reader.word(_WORD, first.append)
    if not (yield from reader.starts(SEPARATOR)):
        return False
    yield from reader.space()
    name = "".join(first)
    if (yield from reader.peek()) != "{":
        # What came first was the kind of tool.
        second: list[str] = []
        yield from reader.word(_WORD, second.append)
        yield from reader.space()
        yield from reader.starts(FENCE)
        yield from reader.space()
        name = "".join(second)
    if (yield from reader.peek()) != "{" or not calls.start(name):
        return False
    if not (yield from json_parser.parse_value(reader, calls.arguments)):
        return False
    for ending in (FENCE_END, CLOSE, BLOCK_END):
        yield from reader.space()
        yield from reader.starts(ending)
    return True


def _written(template: str) -> ToolCallDelimiters:
    """The older format where the template shows its fences."""
    if FENCE in template:
        before = f"{OPEN}function{SEPARATOR}NAME\n{FENCE}\n"
        return ToolCallDelimiters(before, f"\n{FENCE_END}{CLOSE}", BLOCK, "\n", BLOCK_END)
    return ToolCallDelimiters(f"{OPEN}NAME{SEPARATOR}", CLOSE, BLOCK, "", BLOCK_END)


FAMILY = ToolCallFormat(
    name="deepseek",
    parse=_parse,
    markers=(BLOCK, BLOCK_END, OPEN, CLOSE, SEPARATOR),
    written_by=lambda template: BLOCK in template,
    written=_written,
    model_types=("deepseek_v3",),
)
