"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

Owns this format: every tag on a line of its own, a value between two line ends. Source: the models'
chat templates.
"""

import re

from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.reader import ParserCoroutine, TextReader, TextSink
from gllm.text.output.tagged_tool_call import TaggedArguments, tagged_arguments_rule
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]+")


def _parse(reader: TextReader, calls: ToolCallEmitter) -> ParserCoroutine[None]:
    # The model leaves the outer tag out at times.
    stops = (OPEN, FUNCTION, CLOSE)
    while marker := (yield from reader.until(stops, calls.content)):
        if marker != CLOSE:
            yield from calls.attempt(_call(reader, calls, marker), marker)
        else:
            calls.closing(marker)


def _call(reader: TextReader, calls: ToolCallEmitter, marker: str) -> ParserCoroutine[bool]:
    if marker == OPEN:
        yield from reader.space()
        if not (yield from reader.starts(FUNCTION)):
            return False
    name = yield from _tag_name(reader)
    if not calls.start(name):
        return False
    arguments = TaggedArguments(calls, calls.tools.get(name, {}))
    while True:
        yield from reader.space()
        tag = yield from reader.starts(PARAMETER, FUNCTION_END)
        if tag != PARAMETER:
            break
        key = yield from _tag_name(reader)
        if not key or not (yield from arguments.add(key, lambda sink: _value(reader, sink))):
            return False
    if tag:
        arguments.end()
        yield from reader.space()
        yield from reader.starts(CLOSE)
    return bool(tag)


def _tag_name(reader: TextReader) -> ParserCoroutine[str]:
    """Take the rest of a tag: the name in it, empty where it has none."""
    pieces: list[str] = []
    yield from reader.word(_NAME, pieces.append)
    closed = yield from reader.starts(">")
    return "".join(pieces).strip() if closed else ""


def _value(reader: TextReader, sink: TextSink) -> ParserCoroutine[str]:
    yield from reader.starts("\n")
    return (yield from reader.until(("\n" + PARAMETER_END, PARAMETER_END), sink))


FAMILY = ToolCallFormat(
    name="qwen3_coder",
    parse=_parse,
    markers=(OPEN, CLOSE),
    written_by=lambda template: FUNCTION in template and PARAMETER in template,
    written=lambda template: ToolCallDelimiters(
        before=f"{OPEN}\n{FUNCTION}NAME>\n",
        after=f"{FUNCTION_END}\n{CLOSE}",
        between="\n",
        arguments=lambda grammar, schema: tagged_arguments_rule(
            grammar, schema, f"{PARAMETER}KEY>\n", f"\n{PARAMETER_END}", "\n"
        ),
    ),
)
