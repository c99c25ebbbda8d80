"""Tool calls of Mistral: a list of JSON objects, or a name and a JSON object, after a marker.

The formats are `[TOOL_CALLS][{"name": .., "arguments": {..}}, ..]` and, of newer models,
`[TOOL_CALLS]NAME[ARGS]{..}`. The text after the marker decides which one it is. Source: the
models' chat templates.
"""

import re

from gllm.text.output import json_parser, json_tool_call
from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.json_list_tool_call import list_delimiters, parse_call_list
from gllm.text.output.reader import ParserCoroutine, TextReader, discard
from gllm.text.output.reasoning import ReasoningTags
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat, new_short_call_id

MARKER, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
"""Markers before calls, and before the id and the arguments of a call in the newer format."""
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")


def _parse(reader: TextReader, emitter: ToolCallEmitter) -> ParserCoroutine[None]:
    while marker := (yield from reader.consume_until((MARKER,), emitter.add_content)):
        bracket = yield from reader.consume_any("[", " [")
        if bracket:
            yield from parse_call_list(reader, emitter, marker + bracket)
        else:
            yield from emitter.try_call(_parse_single(reader, emitter), marker)


def _parse_single(reader: TextReader, emitter: ToolCallEmitter) -> ParserCoroutine[bool]:
    yield from reader.skip_space()
    if (yield from reader.peek()) == "{":
        return (yield from json_tool_call.parse_json_call(reader, emitter))
    name = yield from reader.read_while(_NAME)
    if (yield from reader.consume_any(ID)):
        yield from reader.consume_while(_NAME, discard)
    yield from reader.consume_any(ARGUMENTS)
    yield from reader.skip_space()
    if (yield from reader.peek()) != "{" or not emitter.start_call(name):
        return False
    return (yield from json_parser.parse_value(reader, emitter.add_arguments))


def _delimiters(template: str) -> ToolCallDelimiters:
    """Return the delimiters of the newer format if the template contains it."""
    if ARGUMENTS in template:
        return ToolCallDelimiters(call_prefix=f"{MARKER}NAME{ARGUMENTS}", call_suffix="")
    return list_delimiters(MARKER)


FORMAT = ToolCallFormat(
    name="mistral",
    parse=_parse,
    markers=(MARKER, ID, ARGUMENTS),
    is_used_by=lambda template: MARKER in template,
    delimiters=_delimiters,
    model_types=("mistral", "mixtral", "mistral3", "ministral"),
    create_call_id=new_short_call_id,
)
REASONING = ReasoningTags("mistral", "[THINK]", "[/THINK]")
