"""Arguments written between tags have the types of their schema, and its rules are enforced."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.text.grammar.sources.rewrite import rewrite_schema
from gllm.text.output.events import AssistantMessage
from gllm.text.output.grammar_builder import (
    GrammarBuilder,
    add_tool_call_rule,
    build_output_grammar,
)
from gllm.text.output.parser import OutputFormat, OutputParser
from gllm.text.output.registry import TOOL_CALL_FORMATS
from gllm.text.tokenizer import Tokenizer
from tests.support.examples import num_examples
from tests.support.text import tokenizers as some
from tests.support.text.judge import Judge
from tests.support.text.tool_formats import gemma4, glm45, glm47, minimax_m2, qwen3_coder

TAGGED = {"qwen3_coder": qwen3_coder, "glm45": glm45, "minimax_m2": minimax_m2}
VERBATIM = {**TAGGED, "gemma4": gemma4}
"""Formats whose strings stand as they are, without escapes."""
TOKENIZER = Tokenizer(some.byte_level())
DEFINITIONS = {
    "text": {"type": "string"},
    "number": {"type": ["number", "null"]},
    "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]},
    "deep": {"$ref": "#/$defs/text"},
}
TYPED: list[tuple[dict[str, Any], Any]] = [
    ({"$ref": "#/$defs/text"}, "5"),
    ({"$ref": "#/$defs/deep"}, "true"),
    ({"$ref": "#/$defs/number"}, 5),
    ({"$ref": "#/$defs/number"}, None),
    ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "5"),
    ({"allOf": [{"$ref": "#/$defs/deep"}], "description": "d"}, "[1]"),
    ({"anyOf": [{"$ref": "#/$defs/text"}, {"const": "x"}]}, "7"),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "so"),
    ({"oneOf": [{"enum": ["1", "2"]}, {"const": "3"}]}, "1"),
    ({"const": "5"}, "5"),
    ({"const": 5}, 5),
    ({"const": True}, True),
    ({"enum": ["null", "1"]}, "null"),
    ({"type": ["string", "integer"], "enum": ["1", "2"]}, "2"),
    ({"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]}, "12"),
    ({"type": "number"}, 3),
    ({}, {"a": [1]}),
]


def message_of(family: str, text: str, schema: dict[str, Any]) -> AssistantMessage:
    parser = OutputParser(
        OutputFormat(tool_call_format=TOOL_CALL_FORMATS[family], tool_schemas={"f": schema})
    )
    message = AssistantMessage()
    for char in text:
        message.apply(parser.push(char))
    message.apply(parser.finish())
    return message


def arguments_of(family: str, text: str, schema: dict[str, Any]) -> Any:
    """The arguments of the only call in a text."""
    message = message_of(family, text, schema)
    (call,) = message.tool_calls.values()
    return json.loads(call.arguments)


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize(("schema", "value"), TYPED)
def test_values_have_the_types_of_their_schema(family, schema, value):
    listed = {"properties": {"a": schema}, "$defs": DEFINITIONS}
    within = {"allOf": [{"$ref": "#/$defs/arguments"}]}
    whole: dict[str, Any] = {**within, "$defs": {**DEFINITIONS, "arguments": listed}}
    text = TAGGED[family]([("f", {"a": value})])
    for root in (listed, whole, {"additionalProperties": schema, "$defs": DEFINITIONS}):
        found = arguments_of(family, text, root)["a"]
        assert (found, type(found)) == (value, type(value))


def test_circles_of_references_end():
    schema = {"properties": {"a": {"$ref": "#/$defs/loop"}}, "$defs": DEFINITIONS}
    text = qwen3_coder([("f", {"a": "word"})])
    assert arguments_of("qwen3_coder", text, schema) == {"a": "word"}


@pytest.mark.parametrize("family", TAGGED)
@settings(max_examples=num_examples(30, 2000), deadline=None)
@given(
    values=st.lists(
        st.text(st.sampled_from('ab<>/="1\n {[]'), max_size=12).filter(
            lambda text: text == text.strip()
        ),
        min_size=1,
        max_size=3,
    ),
    missing=st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_missing_end_tags_lose_nothing(family, values, missing):
    """Strings come back as they were, whichever end tags the model has left out."""
    arguments = {f"p{i}": value for i, value in enumerate(values)}
    schema = {"properties": {name: {"type": "string"} for name in arguments}}
    end = {"qwen3_coder": "\n</parameter>", "minimax_m2": "</parameter>"}.get(
        family, "</arg_value>"
    )
    first, *others = TAGGED[family]([("f", arguments)]).split(end)
    ends = ["" if left_out else end for left_out in missing]
    text = first + "".join(tag + part for tag, part in zip(ends, others, strict=False))
    assert arguments_of(family, text, schema) == arguments


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</tool_call>"),
        ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</function>"),
        ("glm45", "<tool_call>f\n<arg_key>a\n<arg_value>1</arg_value>\n</tool_call>"),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1\n</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "f", "parameters": {"a": "1"}}\n</tool_call>'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "parameters": {"a": "1"}}]'),
    ],
)
def test_forms_that_models_write_at_times(family, text):
    assert arguments_of(family, text, {"properties": {"a": {"type": "string"}}}) == {"a": "1"}


def judge(family: str, schema: dict[str, Any], strict: bool = True) -> Judge:
    tool_format = TOOL_CALL_FORMATS[family]
    grammar = GrammarBuilder(TOKENIZER.token_to_id, tool_format.markers)
    schemas = {"f": rewrite_schema(schema, strict, lenient=not strict)}
    delimiters = tool_format.delimiters("")
    calls = add_tool_call_rule(grammar, delimiters, schemas, False, {"f"} if strict else set())
    return Judge(TOKENIZER, build_output_grammar(grammar, [calls], None, False))


ENFORCED: list[tuple[dict[str, Any], str, str]] = [
    ({"const": "yes"}, "yes", "no"),
    ({"allOf": [{"enum": ["a", "b", "c"]}, {"enum": ["b", "c"]}], "maxLength": 1}, "b", "a"),
    ({"anyOf": [{"const": "yes"}, {"enum": ["no", "or"]}]}, "or", "so"),
    ({"$ref": "#/$defs/code"}, "A-12", "A-1"),
    ({"pattern": "b+$"}, "a\nabb", "ba"),
    ({"pattern": "^x|y"}, "<y>", "<x>"),
    ({"maxLength": 3}, "abc", "abcd"),
    ({"minLength": 2, "pattern": "^[a/]*$"}, "a/", "a"),
    ({"enum": ["ab", "abc"], "minLength": 3}, "abc", "ab"),
]


@pytest.mark.parametrize("family", VERBATIM)
@pytest.mark.parametrize(("rules", "good", "bad"), ENFORCED)
def test_strings_are_enforced(family, rules, good, bad):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", **rules}},
        "required": ["a"],
        "$defs": {"code": {"type": "string", "pattern": r"^[A-Z]-\d{2}$"}},
    }
    judged = judge(family, schema)
    assert judged.takes(VERBATIM[family]([("f", {"a": good})]))
    assert not judged.takes(VERBATIM[family]([("f", {"a": bad})]))


@pytest.mark.parametrize("family", VERBATIM)
@pytest.mark.parametrize(
    "rules", [{"format": "date"}, {"anyOf": [{"pattern": "a"}, {"const": "b"}]}]
)
def test_what_cannot_be_enforced_is_refused_for_strict_functions_alone(family, rules):
    schema = {"type": "object", "properties": {"a": {"type": "string", **rules}}, "required": ["a"]}
    with pytest.raises(ValueError, match=f"'f'.*{min(rules)!r}"):
        judge(family, schema)
    assert judge(family, schema, strict=False).takes(VERBATIM[family]([("f", {"a": "any"})]))


def test_calls_without_line_ends():
    schema = {"properties": {"a": {"const": "1"}}}
    assert arguments_of("glm45", glm47([("f", {"a": "1"})]), schema) == {"a": "1"}
