"""Tool calls of Qwen3-Coder: functions and parameters as tags, one tag per line.

A call is `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` with
line ends between all tags and values. A value also ends where a line begins with the tag after its
missing end tag. Source: the models' chat templates.
"""

import re
from functools import partial

from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.reader import ParserCoroutine, TextReader, TextSink
from gllm.text.output.tagged_tool_call import TaggedArguments, tagged_arguments_expression
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat, parse_marked_calls

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""Markers around a call; the model sometimes omits them."""
FUNCTION, FUNCTION_END = "<function=", "</function>"
"""Tags around the parameters; the first one continues with the tool's name and `>`."""
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
"""Tags around a value; the first one continues with the parameter's name and `>`."""
_VALUE_TAGS = (PARAMETER, FUNCTION_END, CLOSE)
"""Tags after a value: the next one, and the ends of the function and of the call."""
_VALUE_STOPS = (f"\n{PARAMETER_END}", PARAMETER_END, *(f"\n{tag}" for tag in _VALUE_TAGS))
_NAME = re.compile(r"[^<>\n]+")


def _parse_call(reader: TextReader, emitter: ToolCallEmitter, marker: str) -> ParserCoroutine[bool]:
    if marker == OPEN and not (yield from reader.consume_next(FUNCTION)):
        return False
    name = yield from _parse_tag_name(reader)
    if not emitter.start_call(name):
        return False
    arguments = TaggedArguments(emitter, name)
    tag = yield from reader.consume_next(*_VALUE_TAGS)
    while tag == PARAMETER:
        key = yield from _parse_tag_name(reader)
        end = "" if not key else (yield from arguments.parse(key, partial(_parse_value, reader)))
        if not end:
            return False
        tag = end.strip()
        if tag == PARAMETER_END:
            tag = yield from reader.consume_next(*_VALUE_TAGS)
    if tag:
        arguments.finish()
    if tag == FUNCTION_END:
        yield from reader.consume_next(CLOSE)
    return bool(tag)


def _parse_tag_name(reader: TextReader) -> ParserCoroutine[str]:
    """Consume the rest of a tag and return the name in it; empty if it has none."""
    name = yield from reader.read_while(_NAME)
    return name.strip() if (yield from reader.consume_any(">")) else ""


def _parse_value(reader: TextReader, sink: TextSink) -> ParserCoroutine[str]:
    yield from reader.consume_any("\n")
    return (yield from reader.consume_until(_VALUE_STOPS, sink))


FORMAT = ToolCallFormat(
    name="qwen3_coder",
    parse=parse_marked_calls((OPEN, FUNCTION), (CLOSE,), _parse_call),
    markers=(OPEN, CLOSE),
    is_used_by=lambda template: FUNCTION in template and PARAMETER in template,
    delimiters=lambda template: ToolCallDelimiters(
        call_prefix=f"{OPEN}\n{FUNCTION}NAME>\n",
        call_suffix=f"{FUNCTION_END}\n{CLOSE}",
        separator="\n",
        arguments_rule=partial(
            tagged_arguments_expression,
            start_tag=f"{PARAMETER}KEY>\n",
            end_tag=f"\n{PARAMETER_END}",
            separator="\n",
        ),
    ),
)
