"""Convert arguments written as tagged values into a JSON object.

The tool's schema gives the types. A string is streamed while it arrives, any other value when it is
complete.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from gllm.text.output import json_parser
from gllm.text.output.grammar_builder import GrammarBuilder, Schema
from gllm.text.output.reader import ParserCoroutine, TextSink
from gllm.text.output.tool_calls import ToolCallEmitter

_PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
"""Python types by JSON type."""
_PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
"""JSON texts of Python's constants, which models write at times."""


class TaggedArguments:
    """Converts tool call arguments written between tags into the text of a JSON object.

    Args:
        emitter: Receives the JSON text.
        schema: JSON Schema of the arguments.
    """

    def __init__(self, emitter: ToolCallEmitter, schema: Schema) -> None:
        self._emitter = emitter
        self._schema = schema
        self._num_arguments = 0

    def finish(self) -> None:
        """Emit the end of the JSON object."""
        self._emitter.add_arguments("}" if self._num_arguments else "{}")

    def parse(
        self, key: str, parse_value: Callable[[TextSink], ParserCoroutine[str]]
    ) -> ParserCoroutine[str]:
        """Parse the value of an argument and emit it.

        Args:
            key: Name of the argument.
            parse_value: Parses the value, passes its text to a sink and returns its end tag.

        Returns:
            The end tag.
        """
        types = get_property_types(self._schema, key)
        lead = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        self._emitter.add_arguments(f"{lead}{json.dumps(key, ensure_ascii=False)}: ")
        if types == {"string"}:
            self._emitter.add_arguments('"')
            end = yield from parse_value(lambda text: self._emitter.add_arguments(_escape(text)))
            self._emitter.add_arguments('"')
            return end
        pieces: list[str] = []
        end = yield from parse_value(pieces.append)
        self._emitter.add_arguments(to_typed_json("".join(pieces), types))
        return end


def tagged_arguments_expression(
    grammar: GrammarBuilder, schema: Schema, start_tag: str, end_tag: str, separator: str
) -> str:
    """Return the Lark expression of arguments written between tags, in the order of the schema.

    Args:
        grammar: Receives the rules.
        schema: JSON Schema of the arguments.
        start_tag: Text before a value; KEY stands for the argument's name.
        end_tag: Text after a value.
        separator: Text after the end tag.
    """
    required = frozenset(schema.get("required", []))
    parts = []
    for key, value in schema.get("properties", {}).items():
        value_schema = value if isinstance(value, Mapping) else {}
        argument = grammar.add_rule(
            f"{grammar.literal(start_tag.replace('KEY', key))} "
            f"{_value_rule(grammar, schema, value_schema, end_tag)} {grammar.literal(separator)}"
        )
        parts.append(argument if key in required else f"{argument}?")
    return " ".join(parts)


def _value_rule(grammar: GrammarBuilder, schema: Schema, value_schema: Schema, end_tag: str) -> str:
    """Return the expression of a value and its end tag."""
    if _json_types(value_schema) == {"string"}:
        if not isinstance(value_schema.get("enum"), list):
            return grammar.text_until(end_tag)
        words = [grammar.literal(word) for word in value_schema["enum"] if isinstance(word, str)]
        return f"({' | '.join(words)}) {grammar.literal(end_tag)}"
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    value = grammar.add_rule(grammar.json_value({**value_schema, **definitions}))
    return f"{value} {grammar.literal(end_tag)}"


def get_property_types(schema: Schema, key: str) -> set[str]:
    """Return the JSON types that a schema allows for a property; empty for no restriction."""
    properties = schema.get("properties")
    value_schema = properties.get(key) if isinstance(properties, Mapping) else None
    return _json_types(value_schema) if isinstance(value_schema, Mapping) else set()


def _json_types(schema: Schema) -> set[str]:
    """Return the JSON types that a schema permits; empty if it does not say."""
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        types |= {name for name in declared if isinstance(name, str)}
    for keyword in ("anyOf", "oneOf"):
        alternatives = schema.get(keyword)
        for alternative in alternatives if isinstance(alternatives, list) else ():
            if isinstance(alternative, Mapping):
                types |= _json_types(alternative)
    if not types and isinstance(schema.get("enum"), list):
        types = {name for value in schema["enum"] for name in _PYTHON_TYPES if _is(value, name)}
    return types & _PYTHON_TYPES.keys()


def to_typed_json(text: str, types: set[str]) -> str:
    """Convert an argument's text to JSON of one of the types, or to a JSON string if impossible.

    Without types, any JSON value is accepted. Unless a string is permitted, Python's True, False
    and None are accepted as well.
    """
    candidates = [text.strip()]
    if types and "string" not in types:
        candidates.append(_PYTHON_CONSTANTS.get(candidates[0], ""))
    for candidate in candidates:
        try:
            value = json_parser.load_json(candidate)
        except ValueError:
            continue
        if any(_is(value, name) for name in (types or _PYTHON_TYPES)):
            return candidate
    return json.dumps(text, ensure_ascii=False)


def _is(value: Any, json_type: str) -> bool:
    """Return whether a value has a JSON type; Python's booleans are integers, JSON's are not."""
    if isinstance(value, bool) and json_type != "boolean":
        return False
    return isinstance(value, _PYTHON_TYPES[json_type])


def _escape(text: str) -> str:
    """Return text as it is written inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
