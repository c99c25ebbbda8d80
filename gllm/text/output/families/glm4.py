"""GLM-4 before 4.5: a tool's name on a line of its own, and a JSON object on the next.

Owns this format. It has no markers, so a line is a call's beginning only if it is the name of one
of the request's tools. Source: the models' chat templates.
"""

import re

from gllm.text.output import json_parser
from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.reader import ParserCoroutine, TextReader, discard
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat

_BLANK = re.compile(r"[ \t]+")


def _parse(reader: TextReader, calls: ToolCallEmitter) -> ParserCoroutine[None]:
    while (yield from reader.peek()):
        if not (yield from calls.attempt(_call(reader, calls))):
            calls.content((yield from _line_end(reader, calls)))


def _line_end(reader: TextReader, calls: ToolCallEmitter) -> ParserCoroutine[str]:
    """The rest of a line is content."""
    return (yield from reader.until(("\n",), calls.content))


def _call(reader: TextReader, calls: ToolCallEmitter) -> ParserCoroutine[bool]:
    name = yield from _known_name(reader, calls)
    if not name:
        return False
    yield from reader.word(_BLANK, discard)
    if not (yield from reader.starts("\n")):
        return False
    yield from reader.word(_BLANK, discard)
    if (yield from reader.peek()) != "{":
        return False
    calls.start(name)
    return (yield from json_parser.parse_value(reader, calls.arguments))


def _known_name(reader: TextReader, calls: ToolCallEmitter) -> ParserCoroutine[str]:
    """Take the longest name of a tool that comes next."""
    # Longer ones first: one name may be the beginning of another.
    names = sorted(calls.tools, key=len, reverse=True)
    return (yield from reader.starts(*names))


FAMILY = ToolCallFormat(
    name="glm4",
    parse=_parse,
    markers=(),
    written_by=lambda template: "<|observation|>" in template,
    written=lambda template: ToolCallDelimiters(before="NAME\n", after="", between="\n"),
    model_types=("glm", "glm4", "chatglm"),
    only_known=True,
)
