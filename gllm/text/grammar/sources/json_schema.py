"""Check that a JSON Schema uses only supported keywords, in positions where they have a meaning.

The values of single keywords are checked by the grammar compiler.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple
from urllib.parse import unquote

MAX_DEPTH = 96
"""Largest nesting depth of a schema; the compiler accepts 128 with the values around a schema."""

MAX_INTEGER = 2**53
"""Integers beyond are not represented exactly."""

NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value maps names to schemas."""
SINGLE_SCHEMAS = ("items", "additionalItems", "additionalProperties", "propertyNames", "not")
"""Keywords whose value is a schema; in older drafts that of `items` may be a list."""
SCHEMA_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
"""Keywords whose value is a list of schemas."""


class Pointer(NamedTuple):
    """JSON pointer of a part of a schema. The text is built for errors alone: long names repeat."""

    parent: "Pointer | None"
    step: str

    def __str__(self) -> str:
        """Return the text of the pointer; `#` is the whole schema."""
        steps: list[str] = []
        pointer: Pointer | None = self
        while pointer is not None:
            steps.append(pointer.step.replace("~", "~0").replace("/", "~1"))
            pointer = pointer.parent
        return "/".join(reversed(steps))


ROOT = Pointer(None, "#")
"""The whole schema."""
_INDEX = re.compile("0|[1-9][0-9]{0,8}")
"""Index of a list in a JSON pointer."""
Position = tuple[Pointer, object]
"""A JSON pointer within the schema, and the value there."""


def _no_schemas(pointer: Pointer, value: object) -> Iterator[Position]:
    """Return nothing: the value contains no schema."""
    return iter(())


def _check_values(pointer: Pointer, value: object) -> Iterator[Position]:
    """Check a value that is written as it is, or that is a bound. Raises ValueError."""
    if not is_exact(value):
        raise ValueError(
            f"{pointer!s:.200} has an integer beyond 2^53, which is not represented exactly"
        )
    return iter(())


def _single_schema(pointer: Pointer, value: object) -> Iterator[Position]:
    """Yield the value, which is a schema."""
    yield pointer, value


def _schema_list(pointer: Pointer, value: object) -> Iterator[Position]:
    """Yield the members of the value, which is a list of schemas. Raises ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"{pointer!s:.200} must be a list of schemas")
    yield from ((Pointer(pointer, str(index)), item) for index, item in enumerate(value))


def _named_schemas(pointer: Pointer, value: object) -> Iterator[Position]:
    """Yield the members of the value, which maps names to schemas. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{pointer!s:.200} must be an object of schemas")
    yield from ((Pointer(pointer, name), item) for name, item in value.items())


def _items_schemas(pointer: Pointer, value: object) -> Iterator[Position]:
    """Yield the value, or its members if it is a list, as permitted up to draft 2019-09."""
    yield from (_schema_list if isinstance(value, list) else _single_schema)(pointer, value)


ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "$comment",
        "$schema",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
    }
)
"""Keywords that do not restrict valid values."""
KEYWORDS: dict[str, Callable[[Pointer, object], Iterator[Position]]] = {
    "type": _no_schemas,
    **dict.fromkeys(("enum", "const"), _check_values),
    **dict.fromkeys(NAMED_SCHEMAS, _named_schemas),
    **dict.fromkeys(("required", "minProperties", "maxProperties"), _no_schemas),
    **dict.fromkeys(("minItems", "maxItems", "uniqueItems"), _no_schemas),
    **dict.fromkeys(SINGLE_SCHEMAS, _single_schema),
    "items": _items_schemas,
    **dict.fromkeys(SCHEMA_LISTS, _schema_list),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format", "multipleOf"), _no_schemas),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _check_values),
    "$ref": _no_schemas,
    **dict.fromkeys(ANNOTATIONS, _no_schemas),
}
"""Supported keywords, and the function that yields the schemas in their values."""
ENFORCED_KEYWORDS = KEYWORDS.keys() - ANNOTATIONS
"""Keywords that restrict valid values."""


IGNORED_ANNOTATIONS = frozenset(
    (
        *("$id", "id", "$anchor", "$dynamicAnchor", "$vocabulary"),
        *("contentEncoding", "contentMediaType", "contentSchema", "example", "externalDocs", "xml"),
        *("markdownDescription", "enumDescriptions", "enumNames"),
    )
)
"""Further keywords that do not restrict valid values; the compiler does not know them."""
FORMATS = (
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"),
    "unknown",
)
"""Values of `format` that are enforced. Others do not restrict valid values."""


def is_ignored(keyword: str, value: object) -> bool:
    """Return True for a keyword that the compiler does not get: an annotation of any vocabulary."""
    if keyword == "format":
        return isinstance(value, str) and value not in FORMATS
    return keyword in IGNORED_ANNOTATIONS or keyword.startswith("x-")


def check_schema(schema: object) -> None:
    """Check that the grammar compiler supports all keywords and references of a JSON Schema.

    Raises:
        ValueError: A keyword is not supported or a reference leads outside the schema; the message
            has the JSON pointer.
    """
    checked: set[int] = set()
    references: list[Position] = []
    pending: list[Position] = [(ROOT, schema)]
    while pending:
        pointer, value = pending.pop()
        checked.add(id(value))
        if isinstance(value, bool):
            continue
        if not isinstance(value, dict):
            raise ValueError(f"the schema at {pointer!s:.200} must be an object, true or false")
        for keyword, item in value.items():
            if is_ignored(keyword, item):
                continue
            if keyword not in KEYWORDS:
                raise ValueError(
                    f"the keyword {keyword!r:.100} at {pointer!s:.200} is not supported: "
                    f"use one of {', '.join(KEYWORDS)}"
                )
            pending += KEYWORDS[keyword](Pointer(pointer, keyword), item)
            if keyword == "$ref":
                references.append((pointer, item))
    for pointer, target in references:
        # A reference to another document would include schemas that were not checked.
        if id(resolve_reference(schema, target)) not in checked:
            raise ValueError(
                f"$ref at {pointer!s:.200} leads to no schema within this one: {target!r:.200}"
            )


def resolve_reference(root: object, reference: object) -> object:
    """Return the part of the schema `root` that a `$ref` refers to; None if there is none."""
    if not isinstance(reference, str) or not f"{reference}/".startswith("#/"):
        return None
    target = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and name in target:
            target = target[name]
        elif isinstance(target, list) and _INDEX.fullmatch(name) and int(name) < len(target):
            target = target[int(name)]
        else:
            return None
    return target


def compute_nesting_depth(value: object) -> int:
    """Return the nesting depth of a JSON value; 0 for a value without members."""
    return sum(1 for _ in _levels(value)) - 1


def is_exact(value: object) -> bool:
    """Return whether all integers in a JSON value are represented exactly by the compiler."""
    integers = (item for item in _nested_values(value) if isinstance(item, int))
    return all(abs(item) <= MAX_INTEGER for item in integers)


def _nested_values(value: object) -> Iterator[object]:
    """Yield a JSON value and all values nested in it."""
    for level in _levels(value):
        yield from level


def _levels(value: object) -> Iterator[list[object]]:
    """Yield the nested JSON values of each depth."""
    level = [value]
    while level:
        yield level
        nested: list[object] = []
        for item in level:
            if isinstance(item, (dict, list)):
                nested += item.values() if isinstance(item, dict) else item
        level = nested
