"""GLM-4.5 and later: a name and tagged keys and values between `<tool_call>` and `</tool_call>`.

Owns this format: `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`, with and without line ends
between tags. Source: the models' chat templates.
"""

import re

from gllm.text.output.grammar_builder import ToolCallDelimiters
from gllm.text.output.reader import ParserCoroutine, TextReader
from gllm.text.output.tagged_tool_call import TaggedArguments, tagged_arguments_rule
from gllm.text.output.tool_calls import ToolCallEmitter, ToolCallFormat

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[^<\s]+")
_KEY = re.compile(r"[^<\n]+")


def _parse(reader: TextReader, calls: ToolCallEmitter) -> ParserCoroutine[None]:
    while marker := (yield from reader.until((OPEN, CLOSE), calls.content)):
        if marker == OPEN:
            yield from calls.attempt(_call(reader, calls), OPEN)
        else:
            calls.closing(marker)


def _call(reader: TextReader, calls: ToolCallEmitter) -> ParserCoroutine[bool]:
    name: list[str] = []
    yield from reader.space()
    yield from reader.word(_NAME, name.append)
    yield from reader.space()
    # A call begins with a tag behind a name, not with a word behind a marker.
    tag = yield from reader.starts(KEY, CLOSE)
    if not tag or not calls.start("".join(name)):
        return False
    arguments = TaggedArguments(calls, calls.tools.get("".join(name), {}))
    while tag == KEY:
        key: list[str] = []
        yield from reader.word(_KEY, key.append)
        if not (yield from reader.starts(KEY_END)):
            return False
        yield from reader.space()
        if not (yield from reader.starts(VALUE)):
            return False
        text = "".join(key).strip()
        if not (yield from arguments.add(text, lambda sink: reader.until((VALUE_END,), sink))):
            return False
        yield from reader.space()
        tag = yield from reader.starts(KEY, CLOSE)
    if tag:
        arguments.end()
    return bool(tag)


FAMILY = ToolCallFormat(
    name="glm45",
    parse=_parse,
    markers=(OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END),
    written_by=lambda template: KEY in template,
    written=lambda template: ToolCallDelimiters(
        before=f"{OPEN}NAME\n",
        after=CLOSE,
        between="\n",
        arguments=lambda grammar, schema: tagged_arguments_rule(
            grammar, schema, f"{KEY}KEY{KEY_END}\n{VALUE}", VALUE_END, "\n"
        ),
    ),
    model_types=("glm4_moe",),
)
