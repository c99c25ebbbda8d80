"""Rewrite JSON Schemas for the grammar compiler.

Responsible for the keywords that llguidance does not implement and that can be expressed by others
(`propertyNames`, `uniqueItems`, `not`), and for the rule about properties that a schema does not
list. Schemas are nested at most `schema.MAX_DEPTH` levels deep when they arrive here.
"""

import json
from collections.abc import Callable, Mapping
from itertools import permutations
from math import perm
from typing import Any

from gllm.grammar.sources.json_schema import (
    NAMED_SCHEMAS,
    SCHEMA_LISTS,
    SINGLE_SCHEMAS,
    resolve_reference,
)

Schema = dict[str, Any]

MAX_VALUES = 16
MAX_ARRANGEMENTS = 256
"""`uniqueItems` is spelled out as at most so many arrays of so many different items."""
MAX_ARRANGEMENT_CHARACTERS = 2**14
"""Length of their JSON text at most."""
COMPOSITIONS = ("allOf", "anyOf", "oneOf", "$ref")
NOTES = {
    *("title", "description", "default", "examples", "$comment", "$schema", "deprecated"),
    *("readOnly", "writeOnly", "discriminator"),
}
"""Keywords that say nothing about what is valid."""


class UnsupportedKeywordError(ValueError):
    """A keyword whose value cannot be expressed by what the compiler implements."""


def rewrite_schema(schema: Mapping[str, Any], strict: bool, lenient: bool = False) -> Schema:
    """Return a copy that the grammar compiler enforces as a whole.

    Args:
        schema: A JSON Schema.
        strict: Close all objects, as OpenAI's `strict` has it.
        lenient: Drop keywords that cannot be enforced instead of raising.

    Raises:
        UnsupportedKeywordError: A keyword cannot be enforced.
    """
    root = dict(schema)
    parts = _composed_parts(root)

    def rewrite(one: Schema) -> object:
        closed = {} if id(one) in parts else _closing(one, strict)
        made = {name: _map_values(name, value, rewrite) for name, value in one.items()} | closed
        made = _without_older_drafts(made)
        for keyword, express in KEYWORD_REWRITES.items():
            if keyword in made:
                value = made.pop(keyword)
                try:
                    made = express(made, value, root)
                except UnsupportedKeywordError:
                    if not lenient:
                        raise
        return False if made.get("enum") == [] else made

    made = rewrite(root)
    if not isinstance(made, dict):
        raise UnsupportedKeywordError("nothing fits the schema")
    return made


def _map_values(keyword: str, value: object, rewrite: Callable[[Schema], object]) -> object:
    """Return a keyword's value with the schemas in it rewritten."""

    def mapped(one: object) -> object:
        return rewrite(one) if isinstance(one, dict) else one

    if keyword in NAMED_SCHEMAS and isinstance(value, dict):
        return {name: mapped(one) for name, one in value.items()}
    if keyword in (*SCHEMA_LISTS, "items") and isinstance(value, list):
        return [mapped(one) for one in value]
    return mapped(value) if keyword in SINGLE_SCHEMAS else value


def _without_older_drafts(schema: Schema) -> Schema:
    """Return a schema of draft 2020-12: the compiler reads the same keywords otherwise by
    `$schema`."""
    made = {name: value for name, value in schema.items() if name != "$schema"}
    rest = made.pop("additionalItems", None)
    if isinstance(made.get("items"), list):
        first = made.pop("items")
        made |= {"prefixItems": first} if first else {}
        made |= {} if rest is None else {"items": rest}
    return made


def _closing(schema: Schema, strict: bool) -> Schema:
    """Return `additionalProperties: false` for an object schema that is closed without saying so.

    An object that lists its properties has no others, as with vLLM's default backend; with
    `strict`, as with OpenAI, neither has one that lists none.
    """
    speaks = schema.keys() & {"additionalProperties", "patternProperties", "propertyNames"}
    listed = schema.get("properties")
    if listed is None and strict and schema.get("type") == "object":
        listed = {}
    if speaks or not isinstance(listed, dict):
        return {}
    required, least = schema.get("required", []), schema.get("minProperties", 0)
    if not isinstance(required, list) or not isinstance(least, int):
        return {}
    needs_others = any(name not in [*listed] for name in required) or least > len(listed)
    return {} if needs_others else {"additionalProperties": False}


def _composed_parts(root: Schema) -> set[int]:
    """Return the ids of schemas that describe one object together with others.

    Closing one part would forbid the properties that another part lists, so these stay open: the
    parts of an `allOf`, and what stands beside `properties` in `anyOf`, `oneOf` or `$ref`.
    """
    parts: set[int] = set()
    unseen: list[object] = [root]
    while unseen:
        one = unseen.pop()
        if isinstance(one, list):
            unseen += one
        elif isinstance(one, dict):
            unseen += one.values()
            together = len(_alternatives(one, root, "allOf"))
            together += sum(keyword in one for keyword in ("anyOf", "oneOf", "$ref", "properties"))
            if together > 1 and one.keys() & set(COMPOSITIONS):
                _mark(one, root, parts)
    return parts


def _mark(schema: object, root: Schema, parts: set[int]) -> None:
    """Add a schema and all that it is composed of."""
    unseen = [schema]
    while unseen:
        one = unseen.pop()
        if isinstance(one, dict) and id(one) not in parts:
            parts.add(id(one))
            for keyword in COMPOSITIONS:
                unseen += _alternatives(one, root, keyword)


def _alternatives(schema: Schema, root: Schema, keyword: str) -> list[object]:
    """Return the schemas that a keyword composes a schema of."""
    value = schema.get(keyword)
    if keyword == "$ref" and value is not None:
        return [resolve_reference(root, value)]
    return value if isinstance(value, list) else []


def _express_property_names(schema: Schema, names: object, root: Schema) -> Schema:
    """Express `propertyNames` by `properties` or `patternProperties`."""
    if isinstance(names, dict):
        names = {name: value for name, value in names.items() if name not in NOTES}
    if names in (True, {}, {"type": "string"}):
        return schema
    other = schema.get("additionalProperties", True)
    listed = schema.get("properties", {})
    if isinstance(names, dict) and "patternProperties" not in schema:
        known = _values_of(names, root)
        if known is not None:
            named = {name: listed.get(name, other) for name in known if isinstance(name, str)}
            allowed = {name: value for name, value in named.items() if value is not False}
            return {**schema, "properties": allowed, "additionalProperties": False}
        pattern = _name_pattern(names)
        if pattern and not listed:
            return {**schema, "patternProperties": {pattern: other}, "additionalProperties": False}
    raise UnsupportedKeywordError(
        "the keyword 'propertyNames' is supported with type string, enum, const, or, where no "
        "properties are listed, with pattern or minLength and maxLength"
    )


def _name_pattern(names: Schema) -> str:
    """Return a pattern of the names that fit a schema of strings; empty where there is none."""
    bounds = names.keys() & {"minLength", "maxLength"}
    if names.keys() - {"type", "format", "pattern", "minLength", "maxLength"}:
        return ""
    if "pattern" in names and isinstance(names["pattern"], str) and not bounds:
        return names["pattern"]
    if bounds and "pattern" not in names and "format" not in names:
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        return f"^(.|\n){{{least},{most}}}$"
    return ""


def _express_unique_items(schema: Schema, unique: object, root: Schema) -> Schema:
    """Express `uniqueItems` by all arrays of different items, where those are few.

    Otherwise nothing but the number of items is bounded: a grammar cannot remember items.
    """
    values = _values_of(schema.get("items"), root)
    if unique is not True or values is None or "prefixItems" in schema:
        return schema
    least, most = schema.get("minItems", 0), schema.get("maxItems", len(values))
    if not isinstance(least, int) or not isinstance(most, int) or least < 0 or most < 0:
        return schema
    sizes = range(least, min(most, len(values)) + 1)
    if len(values) <= MAX_VALUES and sum(perm(len(values), n) for n in sizes) <= MAX_ARRANGEMENTS:
        arrays = [list(items) for n in sizes for items in permutations(values, n)]
        if len(json.dumps(arrays, ensure_ascii=False)) <= MAX_ARRANGEMENT_CHARACTERS:
            return {name: schema[name] for name in schema.keys() & NOTES} | {"enum": arrays}
    return {**schema, "maxItems": min(most, len(values))}


def _values_of(schema: object, root: Schema) -> list[Any] | None:
    """Return the different values that fit a schema, None where they are not listed."""
    if not isinstance(schema, dict):
        return None
    if "$ref" in schema:
        target = resolve_reference(root, schema["$ref"])
        # One step: a reference to a reference is rare, and may lead in circles.
        schema = target if isinstance(target, dict) and "$ref" not in target else {}
    rest, kind = schema.keys() - NOTES, schema.get("type")
    if rest <= {"enum", "type"} and isinstance(schema.get("enum"), list):
        found = schema["enum"]
    elif rest <= {"const", "type"} and "const" in schema:
        found = [schema["const"]]
    elif rest == {"type"} and kind in ("boolean", "null"):
        found = [False, True] if kind == "boolean" else [None]
    else:
        return None
    if kind == "string":
        found = [value for value in found if isinstance(value, str)]
    elif kind not in (None, "boolean", "null"):
        return None
    return list({json.dumps(value, sort_keys=True): value for value in found}.values())


def _express_not(schema: Schema, excluded: object, root: Schema) -> Schema:
    """Express `not` where it excludes everything, nothing, or some of the values listed."""
    if excluded is False:
        return schema
    if excluded is True or (isinstance(excluded, dict) and not excluded.keys() - NOTES):
        return {"enum": []}
    gone, known = _values_of(excluded, root), _values_of(schema, root)
    if gone is not None and known is not None:
        texts = [json.dumps(value, sort_keys=True) for value in gone]
        kept = [value for value in known if json.dumps(value, sort_keys=True) not in texts]
        return {**{k: v for k, v in schema.items() if k in NOTES}, "enum": kept}
    raise UnsupportedKeywordError(
        "the keyword 'not' is supported with {} and, beside enum or const, with enum or const"
    )


KEYWORD_REWRITES: dict[str, Callable[[Schema, object, Schema], Schema]] = {
    "propertyNames": _express_property_names,
    "uniqueItems": _express_unique_items,
    "not": _express_not,
}
"""Keywords that the compiler lacks, and what puts others in their place. Each function receives
the schema without the keyword, the keyword's value, and the schema's root."""
