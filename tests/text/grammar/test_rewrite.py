"""Keywords that others stand for, and which objects have no other properties."""

import itertools
import json
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from gllm.config.sampling import StructuredOutput
from gllm.options.field_types import FieldError
from gllm.text.grammar.compiler_process import compile_or_error
from gllm.text.grammar.sources.json_schema import KEYWORDS
from gllm.text.grammar.sources.rewrite import (
    MAX_ARRANGEMENTS,
    UnsupportedKeywordError,
    rewrite_schema,
)
from gllm.text.grammar.sources.structured_output import to_grammar_source
from tests.support.examples import num_examples
from tests.support.text.grammar_writing import TOKENIZER, TOKENS, compiled_grammar

LISTED = {"type": "object", "properties": {"a": {"type": "integer"}}}
PARTS = [{**LISTED, "required": ["a"]}, {"properties": {"b": {"type": "null"}}, "required": ["b"]}]


def takes(schema, value, strict=False):
    """Whether the grammar of a schema takes a value, written as the model has to write it."""
    grammar = compiled_grammar(StructuredOutput(json=schema, strict=strict))
    matcher = LLMatcher(TOKENS, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.encode(json.dumps(value, separators=(",", ":"), ensure_ascii=False), False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


ANNOTATED = [
    ({"type": "string", "format": "uint"}, "x", 7),
    ({"type": "string", "format": "json-pointer", "pattern": "^a+$"}, "aa", "b"),
    ({"$id": "http://x/y", "id": "z", "type": "null"}, None, 1),
    ({"$defs": {"a": {"$id": "b", "$anchor": "c", "type": "null"}}, "$ref": "#/$defs/a"}, None, 1),
    (
        {"type": "object", "properties": {"x-a": {"x-b": {}, "type": "null"}}},
        {"x-a": None},
        {"x": 1},
    ),
    ({"type": "string", "contentEncoding": "base64", "contentMediaType": "x"}, "x", 7),
    ({"type": "array", "items": {"type": "null", "x-guidance": {"whitespace": "x"}}}, [None], [1]),
]


@pytest.mark.parametrize(("schema", "value", "other"), ANNOTATED)
@pytest.mark.parametrize("strict", [False, True])
def test_annotations_have_no_effect(schema, value, other, strict):
    assert takes(schema, value, strict)
    assert not takes(schema, other, strict)


OPEN_OBJECTS = [
    # schema, a value with a property that is not listed, whether it fits, whether it does strictly
    (LISTED, {"a": 1, "x": 1}, False, False),
    ({"properties": {"o": LISTED}}, {"o": {"x": 1}}, False, False),
    ({"type": "array", "items": LISTED}, [{"x": 1}], False, False),
    ({"$defs": {"d": LISTED}, "properties": {"o": {"$ref": "#/$defs/d"}}}, {"o": {"x": 1}}, 0, 0),
    ({"anyOf": [LISTED, {"type": "null"}]}, {"x": 1}, False, False),
    ({"type": "object"}, {"x": 1}, True, False),
    ({"type": "object", "properties": {}}, {"x": 1}, False, False),
    ({**LISTED, "additionalProperties": True}, {"x": 1}, True, True),
    ({**LISTED, "additionalProperties": {"type": "null"}}, {"x": None}, True, True),
    ({**LISTED, "patternProperties": {"^x$": {"type": "null"}}}, {"x": None}, True, True),
    ({**LISTED, "required": ["x"]}, {"x": 1}, True, True),
    ({"allOf": PARTS}, {"a": 1, "b": None}, True, True),
    ({"allOf": [LISTED]}, {"a": 1, "x": 1}, False, False),
    (
        {**PARTS[0], "anyOf": [PARTS[1], {"properties": {"c": True}, "required": ["c"]}]},
        {"a": 1, "b": None},
        True,
        True,
    ),
    (
        {"$defs": {"base": PARTS[0]}, "allOf": [{"$ref": "#/$defs/base"}, PARTS[1]]},
        {"a": 1, "b": None},
        True,
        True,
    ),
]


@pytest.mark.parametrize(("schema", "value", "fits", "fits_strictly"), OPEN_OBJECTS)
def test_properties_that_are_not_listed(schema, value, fits, fits_strictly):
    assert takes(schema, value) == bool(fits)
    assert takes(schema, value, strict=True) == bool(fits_strictly)


NAMES = {"type": "object", "additionalProperties": {"type": "integer"}}
UNIQUE = {"type": "array", "uniqueItems": True}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
COLORS = {"enum": ["red", "green"]}
EXPRESSED = [
    (
        {**NAMES, "propertyNames": {"type": "string", "description": "x"}},
        [{}, {"a": 1}],
        [{"a": ""}],
    ),
    ({**NAMES, "propertyNames": COLORS}, [{}, {"red": 1}], [{"blue": 1}, {"red": None}]),
    (
        {**NAMES, "propertyNames": COLORS, "required": ["red", "green"]},
        [{"red": 1, "green": 2}],
        [{"red": 1}, {"red": 1, "green": 2, "blue": 3}],
    ),
    (
        {**NAMES, "propertyNames": {"$ref": "#/$defs/c"}, "$defs": {"c": COLORS}},
        [{"red": 1}],
        [{"x": 1}],
    ),
    ({**NAMES, "propertyNames": {"pattern": "^[a-z]+$"}}, [{"ab": 1}], [{"A": 1}, {"ab": "x"}]),
    (
        {**NAMES, "propertyNames": {"maxLength": 2}},
        [{"": 1}, {"ab": 1}],
        [{"abc": 1}],
    ),
    (
        {**NAMES, "propertyNames": {"maxLength": 2, "minLength": 1}},
        [{"ab": 1}],
        [{"": 1}, {"abc": 1}],
    ),
    ({**LISTED, "propertyNames": {"enum": ["b"]}}, [{}, {"b": "any"}], [{"a": 1}]),
    ({**UNIQUE, "items": COLORS}, [[], ["green", "red"], ["red"]], [["red", "red"], ["blue"]]),
    ({**UNIQUE, "items": COLORS, "minItems": 2}, [["green", "red"]], [["red"], ["red", "red"]]),
    ({**UNIQUE, "items": {"type": "boolean"}, "maxItems": 1}, [[], [True]], [[True, False]]),
    ({**UNIQUE, "items": {"enum": [*range(9)]}}, [[*range(9)]], [[*range(9), 1]]),
    ({**UNIQUE, "uniqueItems": False, "items": COLORS}, [["red", "red"]], [["blue"]]),
    ({"enum": ["a", "b"], "not": {"const": "a"}}, ["b"], ["a"]),
    ({"type": "object", "properties": {"a": {"not": {}}}}, [{}], [{"a": 1}]),
    (
        {**DRAFT_7, "type": "array", "items": [COLORS, {"type": "null"}], "additionalItems": False},
        [["red", None], ["red"], []],
        [["red", None, 1], [None]],
    ),
    (
        {**DRAFT_7, "type": "array", "items": [COLORS], "additionalItems": {"type": "null"}},
        [["red", None, None]],
        [["red", 1]],
    ),
    ({**DRAFT_7, "type": "array", "items": COLORS}, [["red", "green"]], [["blue"]]),
    ({"type": "integer", "multipleOf": 5, "minimum": 0}, [0, 15], [7]),
    ({"type": "object", "minProperties": 1, "maxProperties": 2}, [{"a": 1}], [{}]),
    ({"type": "object", "patternProperties": {"^a": {"type": "null"}}}, [{"a": None}], [{"a": 1}]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), EXPRESSED, ids=lambda one: str(one)[:60])
def test_keywords_that_others_stand_for(schema, good, bad):
    for value in good:
        jsonschema.validate(value, schema)
        assert takes(schema, value), value
    for value in bad:
        assert not takes(schema, value), value


def test_unique_items_that_cannot_be_listed_are_left_to_the_model():
    schema = {**UNIQUE, "items": {"type": "string"}}
    assert takes(schema, ["a", "a"])
    arrays = rewrite_schema({**UNIQUE, "items": {"enum": [*range(5)]}}, strict=False)
    assert len(arrays.get("enum", ())) <= MAX_ARRANGEMENTS


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"type": "object", "propertyNames": {"format": "uuid"}},
        {**LISTED, "propertyNames": {"pattern": "^b"}},
        {"type": "object", "patternProperties": {"a": True}, "propertyNames": {"enum": ["b"]}},
        {"not": {}},
    ],
)
def test_what_nothing_stands_for_is_refused(schema):
    with pytest.raises(FieldError):
        to_grammar_source(StructuredOutput(json=schema))


ODD: list[Any] = [None, True, -1, 2.5, "x", [], [7], [{}], {}, {"": 1}, {"enum": 7}, 2**40]


@pytest.mark.parametrize("keyword", ["uniqueItems", "propertyNames", "not", "items", "minItems"])
@pytest.mark.parametrize("other", ["maxItems", "required", "minProperties", "properties", "enum"])
def test_values_of_no_sense_are_no_error_of_the_server(keyword, other):
    for value in ODD:
        for more in ODD:
            schema = {"type": "object", "items": COLORS, "uniqueItems": True, keyword: value}
            with suppress(UnsupportedKeywordError):
                rewrite_schema({**schema, other: more}, strict=True, lenient=True)


QUARTERS = st.integers(-12, 12).map(lambda quarters: quarters / 4)
BOUNDS = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"),
        QUARTERS.map(lambda bound: int(bound) if bound.is_integer() else bound),
    ),
)


@settings(max_examples=num_examples(40, 1000), deadline=None)
@example(bounds={"exclusiveMinimum": 1, "maximum": 1.25}, is_split=False, kind="number")
@example(bounds={"exclusiveMaximum": 0, "minimum": -0.5}, is_split=False, kind="number")
@example(bounds={"exclusiveMinimum": 1, "maximum": 1.25}, is_split=True, kind="number")
@given(bounds=BOUNDS, is_split=st.booleans(), kind=st.sampled_from(["number", "integer"]))
def test_numbers_are_within_their_bounds(bounds, is_split, kind):
    schema: dict[str, Any] = {"type": kind, **bounds}
    if is_split:
        schema = {"allOf": [{"type": kind}, *({name: value} for name, value in bounds.items())]}
    values = sorted({*bounds.values(), -4, 0, 4})
    middles = [(lower + upper) / 2 for lower, upper in itertools.pairwise(values)]
    numbers = [value for value in [*values, *middles] if kind == "number" or value == int(value)]
    numbers = [int(value) if kind == "integer" else value for value in numbers]
    fitting = [
        number for number in numbers if jsonschema.Draft202012Validator(schema).is_valid(number)
    ]
    try:
        grammar = compiled_grammar(StructuredOutput(json=schema))
        LLMatcher(TOKENS, grammar, log_level=0)
        taken = [number for number in numbers if takes(schema, number)]
    except (AssertionError, ValueError):
        taken = []
    assert taken == fitting


JUNK: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 0, 2.5, 10**400, "a", "", [], ["a", "a"], {}, {"a": 1}, [{}], {"a": {}}]
)
PATTERNS = [
    r"^(?=a)b",
    r"^(?!x).*$",
    r"(?<=a)b",
    r"\bword\b",
    r"(a)\1",
    "a$|^b",
    "[",
    "(",
    "a)",
    "\\",
    r"^[\w$^-]+\$$",
    r"^\d{3}-\d{4}$",
    "x" * 9000,
    r"(?:a|b)+",
    r"(?i)a",
    r"[^\]]*",
]
KINDS = ["any", "file", "object ", ["string", "any"], [], None, 5, "string", "integer", "object"]
ODD_SCHEMAS = st.recursive(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(KINDS),
            "pattern": st.sampled_from(PATTERNS) | JUNK,
            **dict.fromkeys([*KEYWORDS, "contains", "if", "$anchor"], JUNK),
            "$ref": st.sampled_from(["#", "#/properties/p", "#/nowhere", "https://x.org/s", "#a"]),
            "const": st.just("a"),
        },
    ),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(KINDS),
            "properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
            "patternProperties": st.dictionaries(st.sampled_from(PATTERNS), inner, max_size=1),
            "items": inner,
            "allOf": st.lists(inner, max_size=1),
        },
    ),
    max_leaves=4,
)
UNSATISFIABLE = ("Unsatisfiable schema", "nothing fits", "no value fits", "out of range")


@settings(max_examples=num_examples(40, 5000), deadline=None)
@given(schema=ODD_SCHEMAS)
@example({"properties": {"a": {"$ref": "#"}}, "patternProperties": {"(?:a|b)+": {"const": "a"}}})
@example({"items": {"const": "a"}, "allOf": [{"items": {"$ref": "#"}}]})
def test_what_is_not_enforced_leniently_does_not_refuse_a_tool(schema):
    """A schema without any odd values of keywords may still have nothing that fits."""
    rewritten: dict[str, Any] = {}
    with suppress(UnsupportedKeywordError):
        rewritten = rewrite_schema({"properties": {"p": schema}}, strict=False, lenient=True)
    text = json.dumps({**rewritten, "x-guidance": {"lenient": True}})
    _, error = compile_or_error(["json_schema", text], TOKENS)
    assert not error or error.startswith(UNSATISFIABLE), error


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        ({"type": "any", "title": "t"}, {}),
        ({"allOf": [{"$ref": "#"}], "type": "object"}, {"type": "object"}),
        ({"anyOf": [{"$ref": "#"}, {}], "items": {}}, {"items": {}}),
        ({"allOf": [{"$ref": "#"}], "title": "a tree"}, {"allOf": [{"$ref": "#"}]}),
        (
            {"properties": {"a": {"$ref": "#"}}, "patternProperties": {"a+": {"const": "a"}}},
            {"properties": {"a": {"$ref": "#"}}, "additionalProperties": True},
        ),
        ({"type": "string", "pattern": r"\bword\b"}, {"type": "string"}),
        (
            {"type": "string", "pattern": "^(?=a)b$", "maxLength": 5},
            {"type": "string", "maxLength": 5},
        ),
        (
            {"type": "string", "pattern": r"^[\^$]\$\.$"},
            {"type": "string", "pattern": r"^[\^$]\$\.$"},
        ),
        (
            {"patternProperties": {"(?!a)": {}}},
            {"patternProperties": {}, "additionalProperties": True},
        ),
        ({"$ref": "https://x.org/schema", "type": "null"}, {"type": "null"}),
    ],
)
def test_what_is_dropped_leniently(schema, kept):
    assert rewrite_schema(schema, strict=False, lenient=True) == kept
