"""Tool calls of GLM-4 before 4.5: the tool's name on one line, a JSON object on the next.

The format has no markers, so a line begins a call only if it is the name of one of the request's
tools. Source: the models' chat templates.
"""

import re

from gllm.text.output import json_parser
from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.reader import ParserCoroutine, TextReader, discard
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat

_BLANK = re.compile(r"[ \t]+")


def _parse(reader: TextReader, emitter: ToolCallEmitter) -> ParserCoroutine[None]:
    while (yield from reader.peek()):
        if not (yield from emitter.try_call(_parse_call(reader, emitter))):
            line_end = yield from reader.consume_until(("\n",), emitter.add_content)
            emitter.add_content(line_end)


def _parse_call(reader: TextReader, emitter: ToolCallEmitter) -> ParserCoroutine[bool]:
    # Longer names first: one name may be the beginning of another.
    names = sorted(emitter.tool_schemas, key=len, reverse=True)
    name = yield from reader.consume_any(*names)
    if not name:
        return False
    yield from reader.consume_while(_BLANK, discard)
    if not (yield from reader.consume_any("\n")):
        return False
    yield from reader.consume_while(_BLANK, discard)
    if (yield from reader.peek()) != "{":
        return False
    emitter.start_call(name)
    return (yield from json_parser.parse_value(reader, emitter.add_arguments))


FORMAT = ToolCallFormat(
    name="glm4",
    parse=_parse,
    markers=(),
    is_used_by=lambda template: "<|observation|>" in template,
    delimiters=lambda template: ToolCallDelimiters(
        call_prefix="NAME\n", call_suffix="", separator="\n"
    ),
    model_types=("glm", "glm4", "chatglm"),
    only_known_tools=True,
)
