"""Tool calls of Qwen3-Coder: functions and parameters as tags, one tag per line.

A call is `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` with
line ends between all tags and values. Source: the models' chat templates.
"""

import re

from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.reader import ParserCoroutine, TextReader, TextSink
from gllm.text.output.tagged_tool_call import TaggedArguments, tagged_arguments_expression
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""Markers around a call."""
FUNCTION, FUNCTION_END = "<function=", "</function>"
"""Tags around the parameters; the first one continues with the tool's name and `>`."""
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
"""Tags around a value; the first one continues with the parameter's name and `>`."""
_NAME = re.compile(r"[^<>\n]+")


def _parse(reader: TextReader, emitter: ToolCallEmitter) -> ParserCoroutine[None]:
    # The model sometimes omits the outer tag.
    stops = (OPEN, FUNCTION, CLOSE)
    while marker := (yield from reader.consume_until(stops, emitter.add_content)):
        if marker != CLOSE:
            yield from emitter.try_call(_parse_call(reader, emitter, marker), marker)
        else:
            emitter.add_closing_marker(marker)


def _parse_call(reader: TextReader, emitter: ToolCallEmitter, marker: str) -> ParserCoroutine[bool]:
    if marker == OPEN:
        yield from reader.skip_space()
        if not (yield from reader.consume_any(FUNCTION)):
            return False
    name = yield from _parse_tag_name(reader)
    if not emitter.start_call(name):
        return False
    arguments = TaggedArguments(emitter, emitter.tool_schemas.get(name, {}))
    while True:
        yield from reader.skip_space()
        tag = yield from reader.consume_any(PARAMETER, FUNCTION_END)
        if tag != PARAMETER:
            break
        key = yield from _parse_tag_name(reader)
        if not key or not (
            yield from arguments.parse(key, lambda sink: _parse_value(reader, sink))
        ):
            return False
    if tag:
        arguments.finish()
        yield from reader.skip_space()
        yield from reader.consume_any(CLOSE)
    return bool(tag)


def _parse_tag_name(reader: TextReader) -> ParserCoroutine[str]:
    """Consume the rest of a tag and return the name in it; empty if it has none."""
    pieces: list[str] = []
    yield from reader.consume_while(_NAME, pieces.append)
    closed = yield from reader.consume_any(">")
    return "".join(pieces).strip() if closed else ""


def _parse_value(reader: TextReader, sink: TextSink) -> ParserCoroutine[str]:
    yield from reader.consume_any("\n")
    return (yield from reader.consume_until(("\n" + PARAMETER_END, PARAMETER_END), sink))


FORMAT = ToolCallFormat(
    name="qwen3_coder",
    parse=_parse,
    markers=(OPEN, CLOSE),
    is_used_by=lambda template: FUNCTION in template and PARAMETER in template,
    delimiters=lambda template: ToolCallDelimiters(
        call_prefix=f"{OPEN}\n{FUNCTION}NAME>\n",
        call_suffix=f"{FUNCTION_END}\n{CLOSE}",
        separator="\n",
        arguments_rule=lambda grammar, schema: tagged_arguments_expression(
            grammar, schema, f"{PARAMETER}KEY>\n", f"\n{PARAMETER_END}", "\n"
        ),
    ),
)
