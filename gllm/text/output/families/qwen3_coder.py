"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

Owns this format: every tag on a line of its own, a value between two line ends. Source: the models'
chat templates.
"""

import re

from gllm.text.output.calls import Calls, ToolFamily
from gllm.text.output.constraint import Written
from gllm.text.output.reader import Reader, Sink, Wait
from gllm.text.output.tagged_call import TaggedArguments, tagged_grammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]+")


def _parse(reader: Reader, calls: Calls) -> Wait[None]:
    # The model leaves the outer tag out at times.
    stops = (OPEN, FUNCTION, CLOSE)
    while marker := (yield from reader.until(stops, calls.content)):
        if marker != CLOSE:
            yield from calls.attempt(_call(reader, calls, marker), marker)
        else:
            calls.closing(marker)


def _call(reader: Reader, calls: Calls, marker: str) -> Wait[bool]:
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


def _tag_name(reader: Reader) -> Wait[str]:
    """Take the rest of a tag: the name in it, empty where it has none."""
    pieces: list[str] = []
    yield from reader.word(_NAME, pieces.append)
    closed = yield from reader.starts(">")
    return "".join(pieces).strip() if closed else ""


def _value(reader: Reader, sink: Sink) -> Wait[str]:
    yield from reader.starts("\n")
    return (yield from reader.until(("\n" + PARAMETER_END, PARAMETER_END), sink))


FAMILY = ToolFamily(
    name="qwen3_coder",
    parse=_parse,
    markers=(OPEN, CLOSE),
    written_by=lambda template: FUNCTION in template and PARAMETER in template,
    written=lambda template: Written(
        before=f"{OPEN}\n{FUNCTION}NAME>\n",
        after=f"{FUNCTION_END}\n{CLOSE}",
        between="\n",
        arguments=lambda grammar, schema: tagged_grammar(
            grammar, schema, f"{PARAMETER}KEY>\n", f"\n{PARAMETER_END}", "\n"
        ),
    ),
)
