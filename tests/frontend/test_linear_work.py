"""The work for what a client sends grows with its size, never with its square."""

import gc
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from gllm.frontend.fields.chat import ChatCompletionFields
from gllm.frontend.fields.messages import MessagesFields, convert_messages_to_chat
from gllm.frontend.fields.parsing import parse_body, parse_fields, split_strings
from gllm.frontend.fields.responses import convert_input
from gllm.options.field_types import FieldError
from gllm.options.limits import MAX_MESSAGES
from gllm.text.chat.messages import normalize_messages
from gllm.text.chat.tools import parse_tools
from gllm.text.detokenizer import StopMatcher, StopStrings
from gllm.text.grammar.sources.json_schema import check_schema, compute_nesting_depth
from gllm.text.grammar.sources.lenient import find_circular_references
from gllm.text.grammar.sources.patterns import split_alternatives
from gllm.text.grammar.sources.rewrite import rewrite_schema
from gllm.text.output.grammar_builder import GrammarBuilder
from gllm.text.output.parser import OutputFormat, OutputParser
from gllm.text.output.registry import REASONING_TAGS, TOOL_CALL_FORMATS
from gllm.text.output.tagged_tool_call import tagged_arguments_expression
from gllm.text.special_tokens import SpecialTokenMarker, new_mark
from tests.support.text import tokenizers as some

Work = Callable[[], object]
FACTOR = 4
"""Ratio of the two sizes. Quadratic work would take 16 times as long."""
LARGEST_RATIO = 9.0
ATTEMPTS = 8
"""The shortest time at each size counts: other programs only add to it."""


def user(size: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a" * 600}] * size


def blocks(kind: dict[str, Any], role: str) -> Callable[[int], Work]:
    """Return what builds a request of the Messages API with many equal blocks in one message."""

    def make(size: int) -> Work:
        messages = [{"role": role, "content": [kind] * size}]
        fields = MessagesFields(messages=messages, max_tokens=4)
        return lambda: convert_messages_to_chat(fields)

    return make


def merged_messages(size: int) -> Work:
    fields = MessagesFields(messages=user(size), max_tokens=4)
    return lambda: convert_messages_to_chat(fields)


def items(item: dict[str, Any], first: dict[str, Any] | None = None) -> Callable[[int], Work]:
    def make(size: int) -> Work:
        values = [*([first] if first else []), *[item] * size]
        return lambda: convert_input(values, "Be brief.")

    return make


def schema(make: Callable[[int], dict[str, Any]]) -> Callable[[int], Work]:
    """Return what checks and rewrites a JSON Schema."""

    def work(size: int) -> Work:
        value = make(size)

        def check_and_rewrite() -> None:
            compute_nesting_depth(value)
            check_schema(value)
            rewrite_schema(value, strict=True)

        return check_and_rewrite

    return work


def numbered(prefix: str, size: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(size)]


def properties(size: int) -> dict[str, Any]:
    return {name: {"$ref": "#/$defs/d"} for name in numbered("p", size)}


def linked_definitions(size: int) -> dict[str, Any]:
    """Return a chain and a circle of definitions, each of which is merged with other keywords."""
    definitions: dict[str, Any] = {}
    for i in range(size):
        definitions[f"c{i}"] = {"items": {}, "allOf": [{"$ref": f"#/$defs/c{i + 1}"}]}
        definitions[f"r{i}"] = {"items": {}, "allOf": [{"$ref": f"#/$defs/r{(i + 1) % size}"}]}
    definitions[f"c{size}"] = {}
    parts = [{"$ref": "#/$defs/c0"}, {"$ref": "#/$defs/r0"}]
    return {"allOf": parts, "$defs": definitions}


def tagged(size: int) -> Work:
    names = numbered("p", size)
    value = {"properties": {key: {"type": "integer"} for key in names}, "required": names}
    return lambda: tagged_arguments_expression(
        GrammarBuilder(lambda _: 5, ()), value, False, start_tag="", end_tag="", separator=""
    )


def marker_literal(size: int) -> Work:
    grammar = GrammarBuilder(lambda _: 5, ("<tool_call>",))
    return lambda: grammar.literal("<tool_call>a" * size)


def marked(text: str) -> Callable[[int], Work]:
    def make(size: int) -> Work:
        backend = some.byte_level()
        backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        marker, mark = SpecialTokenMarker(backend), new_mark()
        return lambda: marker.mark_values(
            [{"content": text * size, "arguments": text * size}], mark
        )

    return make


def parsed(family: str, text: str, tail: str = "", custom: bool = False) -> Callable[[int], Work]:
    """Return what parses, in small pieces, a text that repeats or that has a long tail."""

    def make(size: int) -> Work:
        output = text + tail * 8 * size if tail else text * size
        tools = frozenset(["f"]) if custom else frozenset()
        form = OutputFormat(
            REASONING_TAGS["think"], False, TOOL_CALL_FORMATS[family], {"f": {}}, tools
        )

        def parse() -> None:
            parser = OutputParser(form)
            for start in range(0, len(output), 8):
                parser.push(output[start : start + 8])
            parser.finish()

        return parse

    return make


def many_calls(size: int) -> Work:
    schemas: dict[str, Any] = {"f": {"properties": {name: {} for name in numbered("p", 40 * size)}}}
    form = OutputFormat(tool_call_format=TOOL_CALL_FORMATS["qwen3_coder"], tool_schemas=schemas)
    text = "<tool_call>\n<function=f>\n</function>\n</tool_call>" * size
    return lambda: OutputParser(form).push(text)


def stopped(size: int) -> Work:
    def search() -> None:
        matcher = StopMatcher(StopStrings(["aab", "ab" * 50]))
        for _ in range(size):
            matcher.push("aa")

    return search


def unknown_fields(size: int) -> Work:
    values = {**dict.fromkeys(numbered("x", size), 1), "messages": user(1)}
    return lambda: parse_fields(values, ChatCompletionFields)


def tool_call(size: int) -> dict[str, Any]:
    arguments = json.dumps({"a": "b" * 100 * size})
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def with_tools(size: int) -> Work:
    parameters = {"type": "object", "properties": {key: {} for key in numbered("p", size)}}
    function = {"name": "f", "parameters": parameters}
    return lambda: parse_tools([{"type": "function", "function": function}], "auto")


TEXT = {"type": "text", "text": "a" * 100}
ITEM = {"role": "user", "content": "a" * 600}
SUMMARY = {"type": "compaction", "encrypted_content": "gllm-summary:YQ=="}
CALL_ITEM = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
REASONING = {"type": "thinking", "thinking": "t" * 100}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "c" * 100}

CASES: dict[str, tuple[Callable[[int], Work], int]] = {
    "messages of one user": (merged_messages, 1000),
    "text blocks": (blocks(TEXT, "user"), 2000),
    "text blocks of the assistant": (blocks(TEXT, "assistant"), 2000),
    "reasoning blocks": (blocks(REASONING, "assistant"), 1000),
    "tool calls": (blocks(USE, "assistant"), 1000),
    "tool results": (blocks(RESULT, "user"), 1000),
    "items of a system": (items({**ITEM, "role": "system"}), 1000),
    "items after a summary": (items(ITEM, SUMMARY), 1000),
    "items of calls": (items(CALL_ITEM), 1000),
    "chat messages": (lambda size: lambda: normalize_messages(user(size)), 1000),
    "parts of a message": (
        lambda size: lambda: normalize_messages([{"role": "user", "content": [TEXT] * size}]),
        4000,
    ),
    "arguments of a call": (
        lambda size: (
            lambda: normalize_messages([{"role": "assistant", "tool_calls": [tool_call(size)]}])
        ),
        4000,
    ),
    "unknown fields": (unknown_fields, 1000),
    "tools": (with_tools, 2000),
    "a body of strings": (
        lambda size: lambda: list(split_strings(b'["\\"a\\\\", "b"]' * size, 2**12)),
        10_000,
    ),
    "a body of lists": (
        lambda size: lambda: parse_body(b'{"a":[' + b"[]," * size + b"1]}"),
        20_000,
    ),
    "a schema below a long name": (
        schema(
            lambda size: (
                {"properties": {"x" * 40 * size: {"properties": properties(size)}}}
                | {"$defs": {"d": {}}}
            )
        ),
        500,
    ),
    "required properties": (
        schema(
            lambda size: {
                "properties": properties(size),
                "required": [f"p{size - 1}"] * size,
                "$defs": {"d": {}},
            }
        ),
        500,
    ),
    "excluded values": (
        schema(lambda size: {"enum": numbered("v", size), "not": {"enum": numbered("w", size)}}),
        1000,
    ),
    "composed schemas": (
        schema(lambda size: {"allOf": [{"$ref": "#/$defs/d"}] * size, "$defs": {"d": {}}}),
        1000,
    ),
    "chains of references": (
        schema(
            lambda size: {
                "anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(size)],
                "properties": {},
                "$defs": {
                    f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i // 2}"}, {}]} for i in range(size)
                },
            }
        ),
        500,
    ),
    "chains and circles of references": (
        lambda size: lambda: find_circular_references(linked_definitions(size)),
        100,
    ),
    "tagged arguments": (tagged, 300),
    "markers in a literal": (marker_literal, 1000),
    "special tokens in a text": (marked("<|im_end|>"), 500),
    "beginnings of special tokens": (marked("<|im_"), 4000),
    "escaped special tokens": (marked("\\<|im_end|>"), 500),
    "stop strings": (stopped, 1000),
    "classes without an end": (lambda size: lambda: split_alternatives("[" * size), 1000),
    "calls of a tool with many arguments": (many_calls, 50),
    "nested arguments": (
        parsed("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "["),
        300,
    ),
    "blanks before the input of a custom tool": (
        parsed("hermes", '<tool_call>{"name": "f", "arguments": {', " ", custom=True),
        500,
    ),
    **{
        f"{family}, {text[:12]}": (parsed(family, text), 100)
        for family in TOOL_CALL_FORMATS
        for text in (
            '<tool_call>{"name": "f", "arguments": {"a": "',
            "<tool_call><function=f>\n ",
            "[TOOL_CALLS][{",
            "f\n{}f\n{",
        )
    },
}


def cpu_seconds(work: Work) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


@pytest.mark.parametrize("name", CASES)
def test_the_work_grows_with_the_size(name: str) -> None:
    make, size = CASES[name]
    small, large = make(size), make(FACTOR * size)
    shortest, longest = float("inf"), float("inf")
    gc.disable()
    try:
        for _ in range(ATTEMPTS):
            shortest = min(shortest, cpu_seconds(small))
            longest = min(longest, cpu_seconds(large))
            if longest <= LARGEST_RATIO * shortest:
                return
    finally:
        gc.enable()
    pytest.fail(f"{FACTOR} times the size takes {longest / shortest:.1f} times as long")


@pytest.mark.parametrize(
    ("convert", "param"),
    [
        (lambda many: convert_messages_to_chat(MessagesFields(messages=many)), "messages"),
        (lambda many: convert_input(many, None), "input"),
    ],
)
def test_messages_are_counted_before_they_are_merged(convert: Any, param: str) -> None:
    with pytest.raises(FieldError, match=str(MAX_MESSAGES)) as refused:
        convert(user(MAX_MESSAGES + 1))
    assert refused.value.param == param
    assert convert(user(MAX_MESSAGES))


def test_repeated_definitions_do_not_fill_the_memory() -> None:
    definitions = {"$defs": {"d": {"enum": numbered("value", 5000)}}}
    value = {"properties": properties(5000), **definitions}
    grammar = GrammarBuilder(lambda _: None, ())
    with pytest.raises(ValueError, match="characters"):
        tagged_arguments_expression(grammar, value, False, start_tag="", end_tag="", separator="")
