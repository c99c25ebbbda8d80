"""Random JSON Schemas over every keyword that is taken, each with some value that fits it."""

from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]

PATTERNS = ["^[a-z]{2,8}$", "^\\d{3}-\\d{4}$", "^(red|green) [A-F]+$", "^x[0-9]+y$", "^$|^-$"]
FORMATS = ["date", "time", "date-time", "ipv4", "ipv6", "uuid", "email", "hostname", "duration"]
WORDS = [
    "Otto",
    "blue",
    "",
    "a b",
    'say "hi"',
    "back\\slash",
    "naïve",
    "🎉",
    "line\nbreak",
    "x" * 40,
]


def schema(rng: Random) -> Schema:
    """A schema that stands by itself."""
    made = _any(rng, 3)
    named = {"leaf": _leaf(rng), "t~r/e e": _tree()}
    if rng.random() < 0.3:
        place = rng.choice(["$defs", "definitions"])
        name = rng.choice(["leaf", "t~0r~1e%20e"])
        target = {"$ref": f"#/{place}/{name}"}
        made = {place: named, **_object(rng, {"one": made, "two": target, "three": target})}
    if rng.random() < 0.2:
        made = {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}
    return _annotated(rng, made)


def _any(rng: Random, depth: int) -> Schema:
    kinds: list[Callable[[Random, int], Schema]] = [_array, _record, _record, _union, _both]
    # Two in seven are leaves.
    kind = rng.choice([None] if depth == 0 else [None, None, *kinds])
    made = _leaf(rng) if kind is None else kind(rng, depth - 1)
    return _annotated(rng, made) if rng.random() < 0.1 else made


def _annotated(rng: Random, made: Schema) -> Schema:
    notes: Schema = {
        "title": "A title",
        "description": "What it is",
        "default": None,
        "examples": [{"multipleOf": 3}],
        "$comment": "none",
        "deprecated": False,
        "readOnly": True,
        "writeOnly": False,
        "discriminator": {"propertyName": "kind"},
    }
    return {**made, **{name: notes[name] for name in rng.sample(list(notes), 2)}}


def _leaf(rng: Random) -> Schema:
    kinds = [_string, _pattern, _format, _integer, _number, _enum, _const, _plain]
    return rng.choice(kinds)(rng)


def _string(rng: Random) -> Schema:
    least = rng.randint(0, 5)
    return rng.choice(
        [
            {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 30)},
            {"type": "string", "maxLength": 25},
        ]
    )


def _pattern(rng: Random) -> Schema:
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


def _format(rng: Random) -> Schema:
    return {"type": "string", "format": rng.choice(FORMATS)}


def _integer(rng: Random) -> Schema:
    low = rng.randint(-1000, 1000)
    return rng.choice(
        [
            {"type": "integer"},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 17},
            {"type": "integer", "minimum": 0},
            {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
        ]
    )


def _number(rng: Random) -> Schema:
    low = rng.randint(-100, 100) / 4
    return rng.choice(
        [
            {"type": "number"},
            {"type": "number", "minimum": low, "maximum": low + 7.5},
            {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        ]
    )


def _enum(rng: Random) -> Schema:
    values = [*rng.sample(WORDS, 3), 7, -2.5, None, True, [1, "a"], {"k": {"multipleOf": 1}}]
    return {"enum": rng.sample(values, rng.randint(1, 6))}


def _const(rng: Random) -> Schema:
    return {"const": rng.choice([*WORDS, 0, False, None, {"a": [1, 2]}])}


def _plain(rng: Random) -> Schema:
    kinds: list[Schema] = [
        {"type": "boolean"},
        {"type": "null"},
        {"type": ["integer", "null", "boolean"]},
        {"enum": ["a", "b", "c"], "not": {"enum": ["b"]}},
    ]
    return rng.choice(kinds)


def _array(rng: Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    if rng.random() < 0.2:
        colors = {"enum": ["red", "green", "blue"]}
        return {"type": "array", "items": colors, "minItems": least, "uniqueItems": True}
    if rng.random() < 0.3:
        first = [_any(rng, depth) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}
    bounds = {"minItems": least, "maxItems": least + rng.randint(0, 3)}
    return {"type": "array", "items": _any(rng, depth), **bounds}


def _record(rng: Random, depth: int) -> Schema:
    if rng.random() < 0.2:
        return _map(rng)
    names = rng.sample(["name", "age", "a b", 'q"q', "ключ", "$ref", "x/y~z", "type"], 4)
    return _object(rng, {name: _any(rng, depth) for name in names[: rng.randint(1, 4)]})


def _map(rng: Random) -> Schema:
    """An object whose names are made up."""
    if rng.random() < 0.3:
        matching: Schema = {"^[ab]{1,3}$": _leaf(rng), "^n_": {"type": "integer"}}
        return {"type": "object", "patternProperties": matching, "additionalProperties": False}
    names: Schema = rng.choice(
        [{"type": "string"}, {"enum": ["left", "right"]}, {"pattern": "^[a-z]{2,9}$"}]
    )
    values: Schema = {"type": "object", "propertyNames": names, "additionalProperties": _leaf(rng)}
    if "enum" in names:
        return values
    return rng.choice([values, {**values, "minProperties": 1, "maxProperties": 2}])


def _object(rng: Random, properties: dict[str, Schema]) -> Schema:
    required = [name for name in properties if rng.random() < 0.7]
    made = {"type": "object", "properties": properties, "required": required}
    more = rng.choice([False, False, {"type": "integer"}, None])
    return made if more is None else {**made, "additionalProperties": more}


def _union(rng: Random, depth: int) -> Schema:
    if rng.random() < 0.5:
        return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(1, 3))]}
    if rng.random() < 0.5:
        return {"oneOf": [{"type": "boolean"}, {"type": "null"}, _string(rng)]}
    sides = [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, "value": _any(rng, depth)},
            "required": ["kind", "value"],
            "additionalProperties": False,
        }
        for kind in ("left", "right")
    ]
    return {"oneOf": sides}


def _both(rng: Random, depth: int) -> Schema:
    """Parts of one object."""
    parts = ({"first": _any(rng, depth)}, {"second": _leaf(rng)})
    return {"allOf": [{"type": "object", "properties": p, "required": list(p)} for p in parts]}


def _tree() -> Schema:
    """A schema that holds itself."""
    children = {"type": "array", "items": {"$ref": "#"}, "maxItems": 0}
    return {"type": "object", "properties": {"children": children}, "additionalProperties": False}
