"""Arguments written as tagged values, which only the tool's schema gives types.

Owns the way from values to a JSON object: a string is passed on while it comes, anything else when
it is complete. Knows nothing of tags.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from gllm.text.output import json_parser
from gllm.text.output.grammar_builder import GrammarBuilder, Schema
from gllm.text.output.reader import ParserCoroutine, TextSink
from gllm.text.output.tool_calls import ToolCallEmitter

_KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


class TaggedArguments:
    """One call's arguments. `schema`: of the arguments."""

    def __init__(self, calls: ToolCallEmitter, schema: Schema) -> None:
        self._calls = calls
        self._schema = schema
        self._count = 0

    def end(self) -> None:
        """There are no more."""
        self._calls.arguments("}" if self._count else "{}")

    def add(
        self, key: str, value: Callable[[TextSink], ParserCoroutine[str]]
    ) -> ParserCoroutine[str]:
        """Take one argument; what `value`, given a sink for the text, returns."""
        kinds = property_types(self._schema, key)
        lead = ", " if self._count else "{"
        self._count += 1
        self._calls.arguments(f"{lead}{json.dumps(key, ensure_ascii=False)}: ")
        if kinds == {"string"}:
            self._calls.arguments('"')
            end = yield from value(lambda text: self._calls.arguments(_escaped(text)))
            self._calls.arguments('"')
            return end
        pieces: list[str] = []
        end = yield from value(pieces.append)
        self._calls.arguments(to_typed_json("".join(pieces), kinds))
        return end


def tagged_arguments_rule(
    grammar: GrammarBuilder, schema: Schema, before: str, end: str, space: str
) -> str:
    """Arguments in the schema's order, those left out that are not required. KEY in `before` stands
    for an argument's name; `end` is behind its value, `space` behind that."""
    required = schema.get("required", [])
    parts = []
    for key, value in schema.get("properties", {}).items():
        of_value = value if isinstance(value, Mapping) else {}
        argument = grammar.rule(
            f"{grammar.text(before.replace('KEY', key))} {_value(grammar, schema, of_value, end)} "
            f"{grammar.text(space)}"
        )
        parts.append(argument if key in required else f"{argument}?")
    return " ".join(parts)


def _value(grammar: GrammarBuilder, schema: Schema, value: Schema, end: str) -> str:
    """A value and its end."""
    if _kinds(value) == {"string"}:
        if not isinstance(value.get("enum"), list):
            return grammar.until(end)
        words = " | ".join(grammar.text(word) for word in value["enum"] if isinstance(word, str))
        return f"({words}) {grammar.text(end)}"
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return f"{grammar.rule(grammar.json({**value, **shared}))} {grammar.text(end)}"


def property_types(schema: Schema, key: str) -> set[str]:
    """The JSON types that a property may have; empty where the schema does not say."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return _kinds(found) if isinstance(found, Mapping) else set()


def _kinds(schema: Schema) -> set[str]:
    said = schema.get("type")
    kinds = {said} if isinstance(said, str) else set()
    if isinstance(said, list):
        kinds |= {kind for kind in said if isinstance(kind, str)}
    for name in ("anyOf", "oneOf"):
        choices = schema.get(name)
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, Mapping):
                kinds |= _kinds(choice)
    if not kinds and isinstance(schema.get("enum"), list):
        kinds = {name for value in schema["enum"] for name in _KINDS if _is(value, name)}
    return kinds & _KINDS.keys()


def to_typed_json(text: str, kinds: set[str]) -> str:
    """A value as JSON: of one of the kinds where it can be read so, else a string. Without kinds
    all are good. Where no string is meant, Python's True, False and None are understood."""
    readings = [text.strip()]
    if kinds and "string" not in kinds:
        readings.append({"True": "true", "False": "false", "None": "null"}.get(readings[0], ""))
    for reading in readings:
        try:
            value = json_parser.load_json(reading)
        except ValueError:
            continue
        if any(_is(value, kind) for kind in (kinds or _KINDS)):
            return reading
    return json.dumps(text, ensure_ascii=False)


def _is(value: Any, kind: str) -> bool:
    """Whether a value has a JSON type; Python's booleans are integers, JSON's are not."""
    if isinstance(value, bool) and kind != "boolean":
        return False
    return isinstance(value, _KINDS[kind])


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
