"""Rewrite JSON Schemas for the grammar compiler.

Expresses keywords that llguidance does not implement by others (`propertyNames`, `uniqueItems`,
`not`), and applies the rule about properties that a schema does not list. Schemas are nested at
most `json_schema.MAX_DEPTH` levels deep here.
"""

import json
import math
from collections.abc import Callable, Mapping
from itertools import permutations
from math import perm
from typing import Any

from gllm.text.grammar.sources.json_schema import (
    ANNOTATIONS,
    NAMED_SCHEMAS,
    SCHEMA_LISTS,
    SINGLE_SCHEMAS,
    is_ignored,
    resolve_reference,
)
from gllm.text.grammar.sources.lenient import drop_unsupported_values, find_circular_references

Schema = dict[str, Any]

MAX_VALUES = 16
"""Largest number of different items for which `uniqueItems` is expressed by arrays."""
MAX_ARRANGEMENTS = 256
"""Largest number of these arrays."""
MAX_ARRANGEMENT_CHARACTERS = 2**14
"""Largest length of the JSON text of these arrays."""
BOUND_STEP = 1e-12
"""Distance of an inclusive bound from the exclusive bound that it stands for."""
COMPOSITIONS = ("allOf", "anyOf", "oneOf", "$ref")
"""Keywords that compose a schema of others."""


class UnsupportedKeywordError(ValueError):
    """A keyword of a JSON Schema cannot be enforced by the grammar compiler."""


def rewrite_schema(schema: Mapping[str, Any], strict: bool, lenient: bool = False) -> Schema:
    """Return a copy of a JSON Schema, restricted to keywords that the grammar compiler enforces.

    Args:
        schema: A JSON Schema.
        strict: Forbid further properties in all objects, as with OpenAI's `strict`.
        lenient: Drop keywords that cannot be enforced instead of raising.

    Raises:
        UnsupportedKeywordError: A keyword cannot be enforced.
    """
    root = dict(schema)
    parts = _composed_parts(root)
    circular = find_circular_references(root) if lenient else frozenset()

    def rewrite(original: Schema) -> object:
        is_part = id(original) in parts
        closed = {} if is_part else _closing_keywords(original, strict)
        accepted = drop_unsupported_values(original, root, circular) if lenient else original
        rewritten = {
            name: _map_values(name, value, rewrite)
            for name, value in accepted.items()
            if not is_ignored(name, value)
        }
        rewritten = _without_older_drafts(closed | rewritten)
        rewritten = _with_inclusive_bounds(rewritten, is_part)
        for keyword, express in KEYWORD_REWRITES.items():
            if keyword in rewritten:
                value = rewritten.pop(keyword)
                try:
                    rewritten = express(rewritten, value, root)
                except UnsupportedKeywordError:
                    if not lenient:
                        raise
        return False if rewritten.get("enum") == [] else rewritten

    schema_or_false = rewrite(root)
    if not isinstance(schema_or_false, dict):
        raise UnsupportedKeywordError("no value fits the schema")
    return schema_or_false


def _map_values(keyword: str, value: object, rewrite: Callable[[Schema], object]) -> object:
    """Return a keyword's value with the schemas in it rewritten."""

    def map_value(item: object) -> object:
        return rewrite(item) if isinstance(item, dict) else item

    if keyword in NAMED_SCHEMAS and isinstance(value, dict):
        return {name: map_value(item) for name, item in value.items()}
    if keyword in (*SCHEMA_LISTS, "items") and isinstance(value, list):
        return [map_value(item) for item in value]
    return map_value(value) if keyword in SINGLE_SCHEMAS else value


def _without_older_drafts(schema: Schema) -> Schema:
    """Return a schema in the keywords of draft 2020-12.

    `$schema` is removed, because the compiler interprets keywords differently depending on it.
    """
    converted = {name: value for name, value in schema.items() if name != "$schema"}
    additional = converted.pop("additionalItems", None)
    if isinstance(converted.get("items"), list):
        prefix = converted.pop("items")
        converted |= {"prefixItems": prefix} if prefix else {}
        converted |= {} if additional is None else {"items": additional}
    return converted


def _with_inclusive_bounds(schema: Schema, is_part: bool) -> Schema:
    """Return a schema with `minimum` and `maximum` for exclusive bounds that are not enforced.

    The compiler permits an exclusive bound that is an integer if the other bound is less than 1
    away. The inclusive bound is `BOUND_STEP` further inside. The other bound may be in another part
    of a composed schema.
    """
    bounds = {
        name: schema[name]
        for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
        if isinstance(schema.get(name), int | float) and not isinstance(schema[name], bool)
    }
    if schema.get("type") == "integer" or not bounds.keys() & {
        "exclusiveMinimum",
        "exclusiveMaximum",
    }:
        return schema
    lower = max(bounds.get("minimum", -math.inf), bounds.get("exclusiveMinimum", -math.inf))
    upper = min(bounds.get("maximum", math.inf), bounds.get("exclusiveMaximum", math.inf))
    if upper - lower >= 1 and not is_part:
        return schema
    converted = dict(schema)
    for exclusive, inclusive, direction, combine in (
        ("exclusiveMinimum", "minimum", math.inf, max),
        ("exclusiveMaximum", "maximum", -math.inf, min),
    ):
        bound = bounds.get(exclusive)
        if bound is not None and float(bound).is_integer():
            del converted[exclusive]
            # A step that is short as a decimal, where floats are that close.
            step = math.copysign(BOUND_STEP, direction)
            closest = combine(math.nextafter(bound, direction), bound + step)
            converted[inclusive] = combine(closest, bounds.get(inclusive, closest))
    return converted


def _closing_keywords(schema: Schema, strict: bool) -> Schema:
    """Return `additionalProperties: false` for an object schema that is closed by default.

    An object that lists its properties has no others, as with vLLM's default backend. With `strict`
    an object that lists none has none, as with OpenAI.
    """
    decides = schema.keys() & {"additionalProperties", "patternProperties", "propertyNames"}
    listed = schema.get("properties")
    if listed is None and strict and schema.get("type") == "object":
        listed = {}
    if decides or not isinstance(listed, dict):
        return {}
    required, min_properties = schema.get("required", []), schema.get("minProperties", 0)
    if not isinstance(required, list) or not isinstance(min_properties, int):
        return {}
    is_listed = [isinstance(name, str) and name in listed for name in required]
    needs_others = not all(is_listed) or min_properties > len(listed)
    return {} if needs_others else {"additionalProperties": False}


def _composed_parts(root: Schema) -> set[int]:
    """Return the ids of schemas that describe one object together with others.

    Closing one part would forbid the properties that another part lists. These schemas therefore
    stay open: the parts of an `allOf`, and `anyOf`, `oneOf` or `$ref` beside `properties`.
    """
    parts: set[int] = set()
    pending: list[object] = [root]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
            num_parts = len(_alternatives(value, root, "allOf"))
            num_parts += sum(key in value for key in ("anyOf", "oneOf", "$ref", "properties"))
            if num_parts > 1 and value.keys() & set(COMPOSITIONS):
                _add_parts(value, root, parts)
    return parts


def _add_parts(schema: object, root: Schema, parts: set[int]) -> None:
    """Add the ids of a schema and of all schemas that it is composed of to `parts`."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict) and id(part) not in parts:
            parts.add(id(part))
            for keyword in COMPOSITIONS:
                pending += _alternatives(part, root, keyword)


def _alternatives(schema: Schema, root: Schema, keyword: str) -> list[object]:
    """Return the schemas that a keyword composes a schema of."""
    value = schema.get(keyword)
    if keyword == "$ref" and value is not None:
        return [resolve_reference(root, value)]
    return value if isinstance(value, list) else []


def _express_property_names(schema: Schema, names: object, root: Schema) -> Schema:
    """Express `propertyNames` by `properties` or `patternProperties`."""
    if isinstance(names, dict):
        names = {name: value for name, value in names.items() if name not in ANNOTATIONS}
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
    """Return a pattern of the names that fit a schema of strings; empty if there is none."""
    bounds = names.keys() & {"minLength", "maxLength"}
    if names.keys() - {"type", "format", "pattern", "minLength", "maxLength"}:
        return ""
    if "pattern" in names and isinstance(names["pattern"], str) and not bounds:
        return names["pattern"]
    if bounds and "pattern" not in names and "format" not in names:
        min_length, max_length = names.get("minLength", 0), names.get("maxLength", "")
        return f"^(.|\n){{{min_length},{max_length}}}$"
    return ""


def _express_unique_items(schema: Schema, unique: object, root: Schema) -> Schema:
    """Express `uniqueItems` by all arrays of different items, if these are few.

    Otherwise only the number of items is limited: a grammar cannot remember items.
    """
    values = _values_of(schema.get("items"), root)
    if unique is not True or values is None or "prefixItems" in schema:
        return schema
    min_items, max_items = schema.get("minItems", 0), schema.get("maxItems", len(values))
    if not all(isinstance(bound, int) and bound >= 0 for bound in (min_items, max_items)):
        return schema
    sizes = range(min_items, min(max_items, len(values)) + 1)
    if len(values) <= MAX_VALUES and sum(perm(len(values), n) for n in sizes) <= MAX_ARRANGEMENTS:
        arrays = [list(items) for n in sizes for items in permutations(values, n)]
        if len(json.dumps(arrays, ensure_ascii=False)) <= MAX_ARRANGEMENT_CHARACTERS:
            return {name: schema[name] for name in schema.keys() & ANNOTATIONS} | {"enum": arrays}
    return {**schema, "maxItems": min(max_items, len(values))}


def _values_of(schema: object, root: Schema) -> list[Any] | None:
    """Return the different values that fit a schema, None if they are not listed."""
    if not isinstance(schema, dict):
        return None
    if "$ref" in schema:
        target = resolve_reference(root, schema["$ref"])
        # One step: a reference to a reference is rare and may be circular.
        schema = target if isinstance(target, dict) and "$ref" not in target else {}
    keywords, kind = schema.keys() - ANNOTATIONS, schema.get("type")
    if keywords <= {"enum", "type"} and isinstance(schema.get("enum"), list):
        values = schema["enum"]
    elif keywords <= {"const", "type"} and "const" in schema:
        values = [schema["const"]]
    elif keywords == {"type"} and kind in ("boolean", "null"):
        values = [False, True] if kind == "boolean" else [None]
    else:
        return None
    if kind == "string":
        values = [value for value in values if isinstance(value, str)]
    elif kind not in (None, "boolean", "null"):
        return None
    return list({json.dumps(value, sort_keys=True): value for value in values}.values())


def _express_not(schema: Schema, excluded: object, root: Schema) -> Schema:
    """Express a `not` that excludes everything, nothing, or some of the listed values."""
    if excluded is False:
        return schema
    if excluded is True or (isinstance(excluded, dict) and not excluded.keys() - ANNOTATIONS):
        return {"enum": []}
    removed, known = _values_of(excluded, root), _values_of(schema, root)
    if removed is not None and known is not None:
        texts = {json.dumps(value, sort_keys=True) for value in removed}
        kept = [value for value in known if json.dumps(value, sort_keys=True) not in texts]
        return {key: schema[key] for key in schema.keys() & ANNOTATIONS} | {"enum": kept}
    raise UnsupportedKeywordError(
        "the keyword 'not' is supported with {} and, beside enum or const, with enum or const"
    )


KEYWORD_REWRITES: dict[str, Callable[[Schema, object, Schema], Schema]] = {
    "propertyNames": _express_property_names,
    "uniqueItems": _express_unique_items,
    "not": _express_not,
}
"""Keywords that the compiler does not implement, and functions that express them by others. Each
function receives the schema without the keyword, the keyword's value, and the root schema."""
