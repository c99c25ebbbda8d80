"""A grammar lets through what a family's models write, and nothing that is no call."""

from typing import Any

import pytest
from tokenizers import AddedToken

from gllm.text.grammar.sources.rewrite import rewrite_schema
from gllm.text.output.grammar_builder import (
    GrammarBuilder,
    add_tool_call_rule,
    build_output_grammar,
)
from gllm.text.output.reasoning import REASONING_TAGS
from gllm.text.output.registry import TOOL_CALL_FORMATS
from gllm.text.output.tool_calls import ToolCallFormat
from gllm.text.tokenizer import Tokenizer
from tests.support.text import tokenizers as some
from tests.support.text.judge import Judge
from tests.support.text.tool_formats import FIRST_ONLY, FORMATS

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"enum": ["c", "f"]},
            "days": {"$ref": "#/$defs/days"},
        },
        "required": ["city", "days"],
        "$defs": {"days": {"type": "array", "items": {"type": "integer"}}},
    },
    "now": {"type": "object", "properties": {}},
}
GOOD = [("get_weather", {"city": 'Köln "am\nRhein" <b>', "unit": "c", "days": [1, 2]})]
SHOWN = {"glm47": "", "mistral_named": "[ARGS]", "deepseek": "```json"}
"""What tells two formats of a family apart in a template."""
ROWS = [row for row in FORMATS if row[1].__name__ not in ("glm47", "llama3_tag")]


def vocabularies(family: ToolCallFormat) -> list[Tokenizer]:
    """One whose markers are tokens, one where they are spelled."""
    tags = [tag for one in REASONING_TAGS.values() for tag in (one.opening, one.closing)]
    added = some.byte_level()
    added.add_tokens([AddedToken(token, special=True) for token in [*family.markers, *tags]])
    return [Tokenizer(added), Tokenizer(some.byte_level())]


def judge(name, write, tokenizer, schemas=SCHEMAS, tags=None, within=False, several=True):
    family = TOOL_CALL_FORMATS[name]
    reasoning = REASONING_TAGS.get(tags)
    shown = () if reasoning is None else (reasoning.opening, reasoning.closing)
    written = family.delimiters(SHOWN.get(write.__name__, ""))
    grammar = GrammarBuilder(tokenizer.token_to_id, (*family.markers, *shown))
    enforced = {tool: rewrite_schema(schema, strict=False) for tool, schema in schemas.items()}
    calls = add_tool_call_rule(grammar, written, enforced, several)
    return Judge(tokenizer, build_output_grammar(grammar, [calls], reasoning, within))


@pytest.mark.parametrize("spelled", [False, True], ids=["tokens", "spelled"])
@pytest.mark.parametrize(("name", "write"), ROWS, ids=[write.__name__ for _, write in ROWS])
def test_calls_and_nothing_else(name, write, spelled):
    tokenizer = vocabularies(TOOL_CALL_FORMATS[name])[spelled]
    made = judge(name, write, tokenizer)
    assert made.takes(write(GOOD))
    assert made.takes(write([*GOOD, ("now", {}), *GOOD])) == (name != "llama3")
    wrong: tuple[list[tuple[str, dict[str, Any]]], ...] = (
        [("unknown", {})],
        [("get_weather", {"city": "x"})],
        [("get_weather", {"city": "x", "days": [], "more": 1})],
        [("now", {"more": 1})],
        [("get_weather", {"city": "x", "days": ["y"]})],
        [("get_weather", {"city": "x", "unit": "k", "days": []})],
    )
    for calls in wrong:
        assert not made.takes(write(calls))
    assert not made.takes("Hello")
    assert not made.takes(f"Hello {write(GOOD)}")
    assert not made.takes("")
    one = judge(name, write, tokenizer, several=False)
    assert one.takes(write(GOOD))
    assert not one.takes(write([*GOOD, ("now", {})]))


@pytest.mark.parametrize("spelled", [False, True], ids=["tokens", "spelled"])
@pytest.mark.parametrize("tags", REASONING_TAGS)
def test_reasoning_first(tags, spelled):
    name, write = FORMATS[0]
    tokenizer = vocabularies(TOOL_CALL_FORMATS[name])[spelled]
    opening, closing = REASONING_TAGS[tags].opening, REASONING_TAGS[tags].closing
    calls = write(GOOD)
    made = judge(name, write, tokenizer, tags=tags)
    for text in (calls, f"{opening}\nhm {{ or\n{closing}\n\n{calls}", f"{opening}{closing}{calls}"):
        assert made.takes(text)
    for text in (f"{opening}hm{calls}", f"hm{closing}{calls}", f"{opening}hm{closing}so"):
        assert not made.takes(text)
    within = judge(name, write, tokenizer, tags=tags, within=True)
    assert within.takes(f"hm, yes\n{closing}\n\n{calls}")
    assert not within.takes(calls)


def test_every_family_has_a_format_that_is_held_against_its_grammar():
    assert {name for name, _ in ROWS} == TOOL_CALL_FORMATS.keys()
    assert TOOL_CALL_FORMATS.keys() >= FIRST_ONLY
