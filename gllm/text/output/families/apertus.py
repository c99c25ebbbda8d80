"""Tool calls of Apertus: `<|tools_prefix|>[{"NAME": {..}}, ..]<|tools_suffix|>`.

Source: the models' chat templates.
"""

from gllm.text.output import json_parser
from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.json_list_tool_call import parse_marked_lists
from gllm.text.output.reader import ParserCoroutine, TextReader
from gllm.text.output.reasoning import ReasoningTags
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat

OPEN, CLOSE = "<|tools_prefix|>", "<|tools_suffix|>"
"""Markers around the list."""


def _parse_call(reader: TextReader, emitter: ToolCallEmitter) -> ParserCoroutine[bool]:
    if not (yield from reader.consume_next("{")):
        return False
    yield from reader.skip_space()
    name = yield from json_parser.parse_decoded_string(reader)
    if name is None or not (yield from reader.consume_next(":")):
        return False
    yield from reader.skip_space()
    if (yield from reader.peek()) != "{" or not emitter.start_call(name):
        return False
    if not (yield from json_parser.parse_value(reader, emitter.add_arguments)):
        return False
    yield from reader.consume_next("}")
    return True


FORMAT = ToolCallFormat(
    name="apertus",
    parse=parse_marked_lists(OPEN, CLOSE, _parse_call),
    markers=(OPEN, CLOSE),
    is_used_by=lambda template: OPEN in template,
    delimiters=lambda template: ToolCallDelimiters(
        call_prefix='{"NAME": ',
        call_suffix="}",
        block_prefix=f"{OPEN}[",
        separator=", ",
        block_suffix=f"]{CLOSE}",
    ),
    model_types=("apertus",),
)
REASONING = ReasoningTags("apertus", "<|inner_prefix|>", "<|inner_suffix|>")
