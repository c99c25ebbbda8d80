"""Tool calls of Hermes, Qwen2.5 and Qwen3: JSON objects between `<tool_call>` tags.

A call is `<tool_call>{"name": .., "arguments": {..}}</tool_call>`.
Source: the models' chat templates.
"""

from gllm.text.output import json_tool_call
from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.reader import ParserCoroutine, TextReader
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat, parse_marked_calls

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""Markers around a call."""


def _parse_call(reader: TextReader, emitter: ToolCallEmitter, _: str) -> ParserCoroutine[bool]:
    yield from reader.skip_space()
    is_call = yield from json_tool_call.parse_json_call(reader, emitter)
    if is_call:
        yield from reader.consume_next(CLOSE)
    return is_call


FORMAT = ToolCallFormat(
    name="hermes",
    parse=parse_marked_calls((OPEN,), (CLOSE,), _parse_call),
    markers=(OPEN, CLOSE),
    is_used_by=lambda template: OPEN in template and '"arguments"' in template,
    delimiters=lambda template: ToolCallDelimiters(
        call_prefix=f'{OPEN}\n{{"name": "NAME", "arguments": ',
        call_suffix=f"}}\n{CLOSE}",
        separator="\n",
    ),
    model_types=("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
)
