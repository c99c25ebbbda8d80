"""Remove from a JSON Schema what the grammar compiler refuses, for tools that are not strict.

Such a tool can be called with arguments that its schema does not permit, which its program has to
check in any case. A call that is refused for its schema would be of less use.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Set
from typing import Any

from gllm.text.grammar.sources.json_schema import (
    ENFORCED_KEYWORDS,
    NAMED_SCHEMAS,
    SCHEMA_LISTS,
    SINGLE_SCHEMAS,
    is_exact,
    resolve_reference,
)
from gllm.text.grammar.sources.patterns import is_supported

Schema = dict[str, Any]

TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})
"""Types of JSON Schema."""
MAX_REFERENCES = 16
"""Largest number of references from one to the next; in a circle there is no end."""
_DEFINITIONS = ("$defs", "definitions")
_COMPOSITIONS = ("allOf", "anyOf", "oneOf")
_NAMED = ("properties", "patternProperties")


def find_circular_references(root: Schema) -> Set[str]:
    """Return the references at whose target the grammar compiler meets the same reference again.

    It merges the parts of an `allOf`, `anyOf` or `oneOf` with the keywords beside it, and a
    property with each pattern that its name matches, and therefore replaces references in them by
    their targets. In a circle it refuses the schema.

    Args:
        root: The whole schema.
    """
    targets: dict[str, int] = {}
    """Id of the target by reference."""
    num_open: dict[int, int] = {}
    """References in a target that may lead into a circle, by the target's id."""
    users: dict[int, list[int]] = {}
    """Targets with a reference to a target."""
    found = set(_find_replaced(root, root, is_merged=False))
    while found:
        reference = found.pop()
        target = resolve_reference(root, reference)
        targets[reference] = id(target)
        if id(target) in num_open:
            continue
        nested = set(_find_replaced(target, root, is_merged=True))
        num_open[id(target)] = len(nested)
        for name in nested:
            users.setdefault(id(resolve_reference(root, name)), []).append(id(target))
        found |= nested - targets.keys()
    ended = [key for key, number in num_open.items() if number == 0]
    while ended:
        for user in users.get(ended.pop(), ()):
            num_open[user] -= 1
            if num_open[user] == 0:
                ended.append(user)
    return {reference for reference, target in targets.items() if num_open[target]}


def _find_replaced(
    schema: object, root: Schema, is_merged: bool, is_nested: bool = True
) -> Iterator[str]:
    """Return the references in a schema that the grammar compiler replaces by their targets.

    Args:
        schema: A schema.
        root: The whole schema.
        is_merged: The schema is merged with another one.
        is_nested: Include those of properties and items.
    """
    remaining: list[tuple[object, bool, Set[str]]] = [(schema, is_merged, frozenset())]
    while remaining:
        # `shared`: keywords of the part that schemas merged with it have too.
        part, is_merged, shared = remaining.pop()
        if not isinstance(part, dict):
            continue
        if _is_reference(part.get("$ref"), root):
            if is_merged:
                yield part["$ref"]
            part = {name: part[name] for name in _DEFINITIONS if name in part}
        names = [name for name in part if name in ENFORCED_KEYWORDS and name not in _DEFINITIONS]
        may_overlap = all(part.get(name) for name in _NAMED)
        branches = [each for name in _COMPOSITIONS for each in _list(part.get(name))]
        repeated = _repeated_keywords([part, *branches])
        for name, value in part.items():
            is_shared = name in shared or name in repeated
            if name in _COMPOSITIONS:
                values = _list(value)
                has_others = is_merged or len(names) > 1 or (name == "allOf" and len(values) > 1)
                remaining += [(each, has_others, shared | repeated) for each in values]
            elif may_overlap and name in _NAMED and isinstance(value, dict):
                remaining += [(each, True, frozenset()) for each in value.values()]
            elif (is_nested or is_shared) and name in NAMED_SCHEMAS and isinstance(value, dict):
                remaining += [(each, is_shared, frozenset()) for each in value.values()]
            elif (is_nested or is_shared) and name in (*SINGLE_SCHEMAS, *SCHEMA_LISTS):
                remaining += [(each, is_shared, frozenset()) for each in _list(value)]


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _repeated_keywords(schemas: list[object]) -> Set[str]:
    """Return the keywords that more than one of the schemas has."""
    counts = Counter(name for each in schemas if isinstance(each, dict) for name in each)
    return {name for name, count in counts.items() if count > 1}


def drop_unsupported_values(schema: Schema, root: Schema, circular: Set[str]) -> Schema:
    """Return a schema without keywords whose values the grammar compiler refuses.

    Args:
        schema: A schema, without its nested schemas: they are treated by themselves.
        root: The whole schema, which references lead into.
        circular: `find_circular_references(root)`.
    """

    def has_circle(part: Schema) -> bool:
        found = _find_replaced(part, root, False, is_nested=False)
        return bool(circular) and not circular.isdisjoint(found)

    if has_circle({name: schema[name] for name in _NAMED if name in schema}):
        schema = {name: value for name, value in schema.items() if name != "patternProperties"}
        # Names that a dropped pattern allows stay allowed.
        schema["additionalProperties"] = True
    if has_circle(schema):
        schema = {name: value for name, value in schema.items() if name not in _COMPOSITIONS}
    kept = {
        name: value
        for name, value in schema.items()
        if name in ENFORCED_KEYWORDS
        and (name not in _IS_SUPPORTED or _IS_SUPPORTED[name](value, root))
    }
    if "$ref" in kept:
        # The keywords beside it have no effect, as up to draft 7: in a circle they are refused.
        kept = {name: kept[name] for name in ("$ref", *_DEFINITIONS) if name in kept}
    named = kept.get("patternProperties")
    if isinstance(named, dict):
        supported = {pattern: each for pattern, each in named.items() if is_supported(pattern)}
        kept["patternProperties"] = supported
        if len(supported) < len(named):
            kept["additionalProperties"] = True
    return kept


def _is_type(value: object, _: Schema) -> bool:
    names = value if isinstance(value, list) else [value]
    return all(isinstance(name, str) and name in TYPES for name in names) and names != []


def _is_count(value: object, _: Schema) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_number(value: object, _: Schema) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and is_exact(value)


def _is_positive(value: object, root: Schema) -> bool:
    return _is_number(value, root) and isinstance(value, int | float) and value > 0


def _is_schema(value: object, _: Schema) -> bool:
    return isinstance(value, dict | bool)


def _is_list_of_schemas(value: object, _: Schema) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict | bool) for each in value)


def _is_object_of_schemas(value: object, _: Schema) -> bool:
    return isinstance(value, dict) and all(isinstance(each, dict | bool) for each in value.values())


def _is_reference(value: object, root: Schema) -> bool:
    """Return whether a reference leads to a schema, through at most MAX_REFERENCES others."""
    target = resolve_reference(root, value)
    for _ in range(MAX_REFERENCES):
        if not isinstance(target, dict) or "$ref" not in target:
            return isinstance(target, dict | bool)
        target = resolve_reference(root, target["$ref"])
    return False


_IS_SUPPORTED: dict[str, Callable[[object, Schema], bool]] = {
    "type": _is_type,
    "enum": lambda value, _: isinstance(value, list) and value != [] and is_exact(value),
    "const": lambda value, _: is_exact(value),
    "required": lambda value, _: (
        isinstance(value, list) and all(isinstance(each, str) for each in value)
    ),
    "pattern": lambda value, _: is_supported(value),
    "format": lambda value, _: isinstance(value, str),
    "$ref": _is_reference,
    "multipleOf": _is_positive,
    "items": lambda value, root: _is_schema(value, root) or _is_list_of_schemas(value, root),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _is_count),
    **dict.fromkeys(("minProperties", "maxProperties"), _is_count),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_number),
    **dict.fromkeys(("additionalProperties", "additionalItems"), _is_schema),
    **dict.fromkeys(("prefixItems", "anyOf", "oneOf", "allOf"), _is_list_of_schemas),
    **dict.fromkeys(("properties", "patternProperties", "$defs"), _is_object_of_schemas),
    "definitions": _is_object_of_schemas,
}
"""By keyword: whether the compiler supports a value, which may refer into the whole schema."""
