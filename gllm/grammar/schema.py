"""Which JSON Schemas are taken: the listed keywords, in places where they mean something.

Owns the list and the walk over a schema. Knows nothing of how a schema becomes a grammar, and
leaves to that what single values have to be.
"""

from collections.abc import Callable, Iterator
from urllib.parse import unquote

MAX_DEPTH = 96
"""Of nested JSON values; the grammar's reader takes 128 with what is put around a schema."""

Place = tuple[str, object]
"""A JSON pointer within the schema, and what is there."""


def _nothing(place: str, value: object) -> Iterator[Place]:
    """A keyword whose value holds no schema."""
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


KEYWORDS: dict[str, Callable[[str, object], Iterator[Place]]] = {
    **dict.fromkeys(("type", "enum", "const"), _nothing),
    **dict.fromkeys(("properties", "$defs", "definitions"), _named),
    **dict.fromkeys(("required", "minItems", "maxItems"), _nothing),
    **dict.fromkeys(("items", "additionalProperties"), _one),
    **dict.fromkeys(("prefixItems", "anyOf", "oneOf", "allOf"), _several),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), _nothing),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _nothing),
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
    todo: list[Place] = [("#", schema)]
    while todo:
        place, one = todo.pop()
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
            todo += KEYWORDS[keyword](f"{place}/{_escaped(keyword)}", value)
            if keyword == "$ref":
                references.append((place, value))
    for place, target in references:
        # One that leads elsewhere would bring in what was not looked at.
        if not isinstance(target, str) or unquote(target) not in places:
            raise ValueError(f"$ref at {place:.200} leads to no schema within this one: {target!r}")


def depth(value: object) -> int:
    """How deep JSON values are nested; 0 for one that is no list or object."""
    level, inside = 0, [value]
    while inside := [one for one in inside if isinstance(one, (dict, list))]:
        level += 1
        nested: list[object] = []
        for one in inside:
            nested += one.values() if isinstance(one, dict) else one
        inside = nested
    return level


def _escaped(name: str) -> str:
    """A name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
