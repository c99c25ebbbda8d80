"""A grammar lets through what a family's models write, and nothing that is no call."""

import re
from typing import Any

import pytest
from tokenizers import AddedToken

from gllm.text.grammar.sources.rewrite import rewrite_schema
from gllm.text.output.grammar_builder import (
    GrammarBuilder,
    add_tool_call_rule,
    build_output_grammar,
)
from gllm.text.output.registry import REASONING_TAGS, TOOL_CALL_FORMATS
from gllm.text.output.tool_calls import ToolCallFormat
from gllm.text.tokenizer import Tokenizer
from tests.support.text import tokenizers as some
from tests.support.text.judge import Judge
from tests.support.text.tool_formats import FIRST_ONLY, FORMATS, SINGLE, gemma4

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
SHOWN = {
    "mistral_named": "[ARGS]",
    "deepseek": "```json",
    "deepseek_v32": "function_calls",
    "hy_v3_opensource": ":opensource",
}
"""What tells two formats of a family apart in a template."""
OTHER = ("glm47", "llama3_tag", "seed_oss_python", "gemma4_quoted", "lfm2_python", "harmony_role")
"""Ways to write calls that are read, but not enforced."""
ROWS = [row for row in FORMATS if row[1].__name__ not in OTHER]


def vocabularies(family: ToolCallFormat) -> list[Tokenizer]:
    """One whose markers are tokens, one where they are spelled."""
    tags = [tag for one in REASONING_TAGS.values() for tag in one.tokens]
    added = some.byte_level()
    added.add_tokens([AddedToken(token, special=True) for token in [*family.markers, *tags]])
    return [Tokenizer(added), Tokenizer(some.byte_level())]


def judge(name, write, tokenizer, schemas=SCHEMAS, tags=None, within=False, several=True):
    family = TOOL_CALL_FORMATS[name]
    reasoning = REASONING_TAGS.get(tags)
    shown = () if reasoning is None else reasoning.tokens
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
    assert made.takes(write([*GOOD, ("now", {}), *GOOD])) == (name not in SINGLE)
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
    if spelled and tags == "harmony":
        pytest.skip("every vocabulary of the tests has the token <|end|>")
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


NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tree": {"$ref": "#/$defs/node"},
        "limits": {
            "type": "object",
            "properties": {"low": {"type": "number"}, "unit": {"enum": ["c", None, 3]}},
        },
        "free": {},
        "either": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "string"}}]},
    },
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["name"],
        }
    },
}
GEMMA_VALUES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"tree": {"name": "a"}}, True),
    ({"tree": {"name": "a", "next": {"name": "b"}}}, True),
    ({"tree": {"next": {"name": "b"}}}, False),
    ({"tree": {"name": 1}}, False),
    ({"limits": {}}, True),
    ({"limits": {"low": -1.5, "unit": None}}, True),
    ({"limits": {"unit": 3}}, True),
    ({"limits": {"low": "1"}}, False),
    ({"limits": {"unit": "d"}}, False),
    ({"free": {"x": [1, "y", {"z": None}], "w": True}}, True),
    ({"either": ["a", "b"]}, True),
    ({"either": False}, True),
    ({"either": 1}, False),
    ({"more": 1}, False),
]


@pytest.mark.parametrize("spelled", [False, True], ids=["tokens", "spelled"])
def test_nested_values_of_gemma(spelled):
    tokenizer = vocabularies(TOOL_CALL_FORMATS["gemma4"])[spelled]
    made = judge("gemma4", gemma4, tokenizer, {"f": NESTED})
    for arguments, is_taken in GEMMA_VALUES:
        text = re.sub(r'([{,])<\|"\|>(\w+)<\|"\|>:', r"\1\2:", gemma4([("f", arguments)]))
        assert made.takes(text) == is_taken, text
