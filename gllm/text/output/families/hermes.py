"""Hermes, Qwen2.5, Qwen3: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`.

Owns this format. Source: the models' chat templates.
"""

from gllm.text.output import json_call
from gllm.text.output.calls import Calls, ToolFamily
from gllm.text.output.constraint import Written
from gllm.text.output.reader import Reader, Wait

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _parse(reader: Reader, calls: Calls) -> Wait[None]:
    while marker := (yield from reader.until((OPEN, CLOSE), calls.content)):
        if marker == OPEN:
            yield from calls.attempt(_call(reader, calls), OPEN)
        else:
            calls.closing(marker)


def _call(reader: Reader, calls: Calls) -> Wait[bool]:
    yield from reader.space()
    good = yield from json_call.call(reader, calls)
    if good:
        yield from reader.space()
        yield from reader.starts(CLOSE)
    return good


FAMILY = ToolFamily(
    name="hermes",
    parse=_parse,
    markers=(OPEN, CLOSE),
    written_by=lambda template: OPEN in template and '"arguments"' in template,
    written=lambda template: Written(
        before=f'{OPEN}\n{{"name": "NAME", "arguments": ',
        after=f"}}\n{CLOSE}",
        between="\n",
    ),
    model_types=("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
)
