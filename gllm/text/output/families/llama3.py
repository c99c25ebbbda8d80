"""Tool calls of Llama 3: `{"name": .., "parameters": {..}}`, separated by `;`.

The objects stand alone or after `<|python_tag|>`. Without this marker an object is a call only at
the beginning of the answer. In both cases it has to name one of the request's tools, because JSON
may be the answer itself. Source: the models' chat templates.
"""

from gllm.text.output import json_tool_call
from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.reader import ParserCoroutine, TextReader
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat

TAG = "<|python_tag|>"
"""Optional marker before calls."""


def _parse(reader: TextReader, emitter: ToolCallEmitter) -> ParserCoroutine[None]:
    yield from _parse_series(reader, emitter, "")
    while marker := (yield from reader.consume_until((TAG,), emitter.add_content)):
        yield from _parse_series(reader, emitter, marker)


def _parse_series(
    reader: TextReader, emitter: ToolCallEmitter, marker: str
) -> ParserCoroutine[None]:
    """Parse consecutive calls, up to the first text that is no call."""
    is_call = yield from emitter.try_call(_parse_call(reader, emitter), marker)
    while is_call:
        separator = yield from reader.consume_any(";", ",")
        is_call = yield from emitter.try_call(_parse_call(reader, emitter), separator)


def _parse_call(reader: TextReader, emitter: ToolCallEmitter) -> ParserCoroutine[bool]:
    yield from reader.consume_next(TAG)
    yield from reader.skip_space()
    return (yield from json_tool_call.parse_json_call(reader, emitter))


FORMAT = ToolCallFormat(
    name="llama3",
    parse=_parse,
    markers=(TAG,),
    is_used_by=lambda template: TAG in template or '"parameters": dictionary' in template,
    # The chat templates accept no more than one call per answer.
    delimiters=lambda template: ToolCallDelimiters(
        call_prefix='{"name": "NAME", "parameters": ', call_suffix="}", allows_parallel=False
    ),
    only_known_tools=True,
)
