"""Which JSON Schemas are taken: the listed keywords, in places where they mean something.

Owns the list and the walk over a schema. Knows nothing of how a schema becomes a grammar, and
leaves to that what single values have to be.
"""

from collections.abc import Callable, Iterator
from urllib.parse import unquote

MAX_DEPTH = 96
"""Of nested JSON values; the grammar's reader takes 128 with what is put around a schema."""

LARGEST = 2**53
"""Whole numbers beyond are not kept exactly."""

NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value maps names to schemas."""
SINGLE_SCHEMAS = ("items", "additionalItems", "additionalProperties", "propertyNames", "not")
"""Keywords whose value is a schema; that of `items` was a list of schemas in older drafts."""
SCHEMA_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
"""Keywords whose value is a list of schemas."""

Place = tuple[str, object]
"""A JSON pointer within the schema, and what is there."""


def _nothing(place: str, value: object) -> Iterator[Place]:
    """A keyword whose value holds no schema."""
    return iter(())


def _values(place: str, value: object) -> Iterator[Place]:
    """A keyword whose value is what is written, or a bound on it."""
    if any(isinstance(one, int) and abs(one) > LARGEST for one in _within(value)):
        raise ValueError(f"{place:.200} has a whole number beyond 2^53, which is not kept exactly")
    return iter(())


def _one(place: str, value: object) -> Iterator[Place]:
    """A keyword whose value is a schema."""
    yield place, value


def _several(place: str, value: object) -> Iterator[Place]:
    """A keyword whose value is a list of schemas."""
    if not isinstance(value, list):
        raise ValueError(f"{place} has to be a list of schemas")
    yield from ((f"{place}/{index}", one) for index, one in enumerate(value))


def _named(place: str, value: object) -> Iterator[Place]:
    """A keyword whose value is schemas by name."""
    if not isinstance(value, dict):
        raise ValueError(f"{place} has to be an object of schemas")
    yield from ((f"{place}/{_escaped(name)}", one) for name, one in value.items())


def _items(place: str, value: object) -> Iterator[Place]:
    """A keyword whose value is a schema, or a list of them, as up to draft 2019-09."""
    yield from (_several if isinstance(value, list) else _one)(place, value)


KEYWORDS: dict[str, Callable[[str, object], Iterator[Place]]] = {
    "type": _nothing,
    **dict.fromkeys(("enum", "const"), _values),
    **dict.fromkeys(NAMED_SCHEMAS, _named),
    **dict.fromkeys(("required", "minProperties", "maxProperties"), _nothing),
    **dict.fromkeys(("minItems", "maxItems", "uniqueItems"), _nothing),
    **dict.fromkeys(SINGLE_SCHEMAS, _one),
    "items": _items,
    **dict.fromkeys(SCHEMA_LISTS, _several),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format", "multipleOf"), _nothing),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _values),
    "$ref": _nothing,
    **dict.fromkeys(("title", "description", "default", "examples", "$comment"), _nothing),
    **dict.fromkeys(("$schema", "deprecated", "readOnly", "writeOnly"), _nothing),
    "discriminator": _nothing,
}
"""Every keyword that is taken, and where its value holds schemas. Those of the last three lines
say nothing about what is valid."""


def check_schema(schema: object) -> None:
    """Raises ValueError for a schema with another keyword; the message names it and its place."""
    places: set[str] = set()
    references: list[Place] = []
    unseen: list[Place] = [("#", schema)]
    while unseen:
        place, one = unseen.pop()
        places.add(place)
        if isinstance(one, bool):
            continue
        if not isinstance(one, dict):
            raise ValueError(f"the schema at {place} has to be an object, true or false")
        for keyword, value in one.items():
            if keyword not in KEYWORDS:
                raise ValueError(
                    f"the keyword {keyword!r:.100} at {place:.200} is not supported: "
                    f"take one of {', '.join(KEYWORDS)}"
                )
            unseen += KEYWORDS[keyword](f"{place}/{_escaped(keyword)}", value)
            if keyword == "$ref":
                references.append((place, value))
    for place, target in references:
        # One that leads elsewhere would bring in what was not looked at.
        if not isinstance(target, str) or unquote(target) not in places:
            raise ValueError(f"$ref at {place:.200} leads to no schema within this one: {target!r}")


def resolve_reference(root: object, reference: object) -> object:
    """Return the schema within `root` that a `$ref` leads to; None where it leads nowhere."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def nesting_depth(value: object) -> int:
    """How deep JSON values are nested; 0 for one that holds no others."""
    return sum(1 for _ in _levels(value)) - 1


def _within(value: object) -> Iterator[object]:
    """A JSON value and all that is in it."""
    for level in _levels(value):
        yield from level


def _levels(value: object) -> Iterator[list[object]]:
    """JSON values by how deep they are nested."""
    level = [value]
    while level:
        yield level
        nested: list[object] = []
        for one in level:
            if isinstance(one, (dict, list)):
                nested += one.values() if isinstance(one, dict) else one
        level = nested


def _escaped(name: str) -> str:
    """A name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
