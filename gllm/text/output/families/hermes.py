"""Hermes, Qwen2.5, Qwen3: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`.

Owns this format. Source: the models' chat templates.
"""

from gllm.text.output import json_tool_call
from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.reader import ParserCoroutine, TextReader
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _parse(reader: TextReader, calls: ToolCallEmitter) -> ParserCoroutine[None]:
    while marker := (yield from reader.until((OPEN, CLOSE), calls.content)):
        if marker == OPEN:
            yield from calls.attempt(_call(reader, calls), OPEN)
        else:
            calls.closing(marker)


def _call(reader: TextReader, calls: ToolCallEmitter) -> ParserCoroutine[bool]:
    yield from reader.space()
    good = yield from json_tool_call.parse_json_call(reader, calls)
    if good:
        yield from reader.space()
        yield from reader.starts(CLOSE)
    return good


FAMILY = ToolCallFormat(
    name="hermes",
    parse=_parse,
    markers=(OPEN, CLOSE),
    written_by=lambda template: OPEN in template and '"arguments"' in template,
    written=lambda template: ToolCallDelimiters(
        before=f'{OPEN}\n{{"name": "NAME", "arguments": ',
        after=f"}}\n{CLOSE}",
        between="\n",
    ),
    model_types=("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
)
