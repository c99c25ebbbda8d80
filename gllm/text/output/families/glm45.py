"""Tool calls of GLM-4.5 and later: `<tool_call>NAME`, tagged keys and values, `</tool_call>`.

Arguments are `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`, with and without line ends
between tags. A key or value also ends at the tag after its missing end tag. Source: the models'
chat templates.
"""

import re
from functools import partial

from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.reader import ParserCoroutine, TextReader
from gllm.text.output.tagged_tool_call import TaggedArguments, tagged_arguments_expression
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat, parse_marked_calls

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""Markers around a call."""
KEY, KEY_END = "<arg_key>", "</arg_key>"
"""Tags around the name of an argument."""
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
"""Tags around the value of an argument."""
_VALUE_STOPS = (VALUE_END, f"\n{KEY}", KEY, f"\n{CLOSE}", CLOSE)
_NAME = re.compile(r"[^<\s]+")
_KEY = re.compile(r"[^<\n]+")


def _parse_call(reader: TextReader, emitter: ToolCallEmitter, _: str) -> ParserCoroutine[bool]:
    yield from reader.skip_space()
    name = yield from reader.read_while(_NAME)
    yield from reader.skip_space()
    # A call needs a tag after the name, not just a word after the marker.
    tag = yield from reader.consume_any(KEY, CLOSE)
    if not tag or not emitter.start_call(name):
        return False
    arguments = TaggedArguments(emitter, name)
    while tag == KEY:
        key = yield from reader.read_while(_KEY)
        yield from reader.consume_any(KEY_END)
        if not (yield from reader.consume_next(VALUE)):
            return False
        end = yield from arguments.parse(
            key.strip(), lambda sink: reader.consume_until(_VALUE_STOPS, sink)
        )
        if not end:
            return False
        tag = end.strip()
        if tag == VALUE_END:
            tag = yield from reader.consume_next(KEY, CLOSE)
    if tag:
        arguments.finish()
    return bool(tag)


FORMAT = ToolCallFormat(
    name="glm45",
    parse=parse_marked_calls((OPEN,), (CLOSE,), _parse_call),
    markers=(OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END),
    is_used_by=lambda template: KEY in template,
    delimiters=lambda template: ToolCallDelimiters(
        call_prefix=f"{OPEN}NAME\n",
        call_suffix=CLOSE,
        separator="\n",
        arguments_rule=partial(
            tagged_arguments_expression,
            start_tag=f"{KEY}KEY{KEY_END}\n{VALUE}",
            end_tag=VALUE_END,
            separator="\n",
        ),
    ),
    model_types=("glm4_moe",),
)
