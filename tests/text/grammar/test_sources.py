"""What is refused before anything is compiled, and how it is told."""

import json
from typing import Any

import pytest

from gllm.config.sampling import SamplingParams, StructuredOutput
from gllm.options.field_types import FieldError
from gllm.text.grammar.sources.json_schema import MAX_DEPTH, check_schema, compute_nesting_depth
from gllm.text.grammar.sources.structured_output import MAX_BYTES, MAX_CHOICES, to_grammar_source

OTHERS = [
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "dependentRequired",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
    "nullable",
    "Type",
]


@pytest.mark.parametrize("keyword", OTHERS)
@pytest.mark.parametrize(
    "around",
    [
        lambda one: one,
        lambda one: {"properties": {"a": {"items": one}}},
        lambda one: {"anyOf": [True, {"allOf": [{"oneOf": [one]}]}]},
        lambda one: {"prefixItems": [{"additionalProperties": one}]},
        lambda one: {"$defs": {"x": one}},
        lambda one: {"definitions": {"x": one}},
    ],
)
def test_another_keyword_is_refused_by_name_wherever_it_is(keyword, around):
    with pytest.raises(ValueError, match="is not supported") as refused:
        check_schema(around({"type": "string", keyword: {}}))
    assert repr(keyword) in str(refused.value)


def test_names_and_values_are_no_keywords():
    check_schema(
        {
            "properties": {"if": {"const": {"if": 1}}, "contains": {"enum": [{"else": 2}]}},
            "$defs": {"contains": True},
            "default": {"contains": 1},
            "examples": [{"if": {}}],
            "required": ["if"],
        }
    )


@pytest.mark.parametrize(
    "target", ["#/default", "#/enum/0", "http://x/y", "other", "#/$defs/none", 7, "#/", None]
)
def test_references_lead_to_schemas_that_were_looked_at(target):
    schema = {"$defs": {"a~/b c": {}}, "enum": [{"if": {}}], "default": {"contains": 3}}
    check_schema({**schema, "items": {"$ref": "#/$defs/a~0~1b%20c"}})
    check_schema({**schema, "items": {"$ref": "#"}})
    with pytest.raises(ValueError, match="leads to no schema"):
        check_schema({**schema, "items": {"$ref": target}})


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"properties": {"a": 1}},
        {"anyOf": {}},
        {"anyOf": [7]},
        {"items": [7]},
        {"items": None},
        {"$defs": "x"},
        {"allOf": "x"},
    ],
)
def test_schemas_where_there_are_none(schema):
    with pytest.raises(ValueError, match="must be"):
        check_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53 + 1},
        {"enum": [1, {"a": [-(2**60)]}]},
        {"items": {"minimum": 2**63}},
        {"exclusiveMaximum": -(2**53) - 1},
    ],
)
def test_numbers_that_would_not_be_kept_are_refused(schema):
    with pytest.raises(ValueError, match="beyond 2"):
        check_schema(schema)
    check_schema({"const": 2**53, "default": 2**63, "maximum": 1e300, "enum": [[], {}, True]})


def nested(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


REFUSED: dict[str, dict[str, Any]] = {
    "deep": {"json": nested(MAX_DEPTH)},
    "very deep": {"json": nested(10_000)},
    "deep text": {"json": "[" * 50_000},
    "huge": {"json": {"enum": ["x" * 100] * 2000}},
    "no object": {"json": "[]"},
    "no JSON": {"json": "{"},
    "a number of many digits": {"json": '{"const": ' + "1" * 5000 + "}"},
    "empty text": {"json": ""},
    "half a character": {"json": {"const": "\ud800"}},
    "empty regex": {"regex": ""},
    "long regex": {"regex": "a" * (MAX_BYTES["regex"] + 1)},
    "zero byte": {"regex": "a\0b"},
    "no choice": {"choice": ()},
    "many choices": {"choice": tuple(map(str, range(MAX_CHOICES + 1)))},
    "long choice": {"choice": ("x" * MAX_BYTES["choice"],)},
    "empty grammar": {"grammar": ""},
    "long grammar": {"grammar": "x" * (MAX_BYTES["grammar"] + 1)},
}


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_are_bounded_before_anything_is_compiled(case):
    with pytest.raises(FieldError) as refused:
        to_grammar_source(StructuredOutput(**REFUSED[case], param="response_format"))
    assert refused.value.param == "response_format"
    assert str(refused.value).startswith("response_format: ")
    assert len(str(refused.value)) < 2000


def test_one_of_four():
    for given in ({}, {"regex": "a", "choice": ("b",)}, {"json": {}, "grammar": "x"}):
        with pytest.raises(FieldError, match="exactly one"):
            StructuredOutput(**given)
    with pytest.raises(FieldError, match="structured output") as refused:
        SamplingParams(min_tokens=3, structured=StructuredOutput(regex="a"))
    assert refused.value.param == "min_tokens"


def test_what_is_compiled():
    kind, text = to_grammar_source(StructuredOutput(json='{"type": "null"}'))
    assert (kind, json.loads(text)["type"]) == ("json_schema", "null")
    assert to_grammar_source(StructuredOutput(grammar='root ::= "a"')).format == "gbnf"
    assert to_grammar_source(StructuredOutput(grammar='start: "a"')).format == "lark"
    assert (
        to_grammar_source(StructuredOutput(choice=('a"', "b", "b"))).text == 'start: "a\\"" | "b"'
    )


def test_depth():
    nested: list[Any] = [1, [], [[]], {"a": [1, {"b": {}}]}]
    assert [compute_nesting_depth(one) for one in nested] == [0, 0, 1, 3]
