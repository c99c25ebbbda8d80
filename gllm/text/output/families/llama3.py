"""Llama 3: `{"name": .., "parameters": {..}}`, alone or behind `<|python_tag|>`; several with `;`.

Owns this format. Without the marker an object is a call only at the beginning of the answer, and in
any case only of one of the request's tools: JSON may be the answer itself. Source: the models' chat
templates.
"""

from gllm.text.output import json_tool_call
from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.reader import ParserCoroutine, TextReader
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat

TAG = "<|python_tag|>"


def _parse(reader: TextReader, calls: ToolCallEmitter) -> ParserCoroutine[None]:
    yield from _series(reader, calls, "")
    while marker := (yield from reader.until((TAG,), calls.content)):
        yield from _series(reader, calls, marker)


def _series(reader: TextReader, calls: ToolCallEmitter, marker: str) -> ParserCoroutine[None]:
    """Calls one behind the other, up to what is none."""
    good = yield from calls.attempt(_call(reader, calls), marker)
    while good:
        separator = yield from reader.starts(";", ",")
        good = yield from calls.attempt(_call(reader, calls), separator)


def _call(reader: TextReader, calls: ToolCallEmitter) -> ParserCoroutine[bool]:
    yield from reader.space()
    yield from reader.starts(TAG)
    yield from reader.space()
    return (
        yield from json_tool_call.parse_json_call(
            reader, calls, arguments=("parameters", "arguments")
        )
    )


FAMILY = ToolCallFormat(
    name="llama3",
    parse=_parse,
    markers=(TAG,),
    written_by=lambda template: TAG in template or '"parameters": dictionary' in template,
    # The templates take no more than one call of an answer.
    written=lambda template: ToolCallDelimiters(
        before='{"name": "NAME", "parameters": ', after="}", several=False
    ),
    only_known=True,
)
