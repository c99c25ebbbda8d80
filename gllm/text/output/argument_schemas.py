"""Find what a tool's schema says about one argument: its types, and the texts of a string.

References, `allOf`, `anyOf`, `oneOf`, `const` and `enum` are resolved.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from gllm.text.grammar.sources.json_schema import ANNOTATIONS, resolve_reference
from gllm.text.grammar.sources.patterns import split_alternatives, strip_anchors

Schema = Mapping[str, Any]
"""A JSON Schema."""
PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
"""Python types by JSON type."""
ALL_TYPES = frozenset(PYTHON_TYPES)
MAX_DEPTH = 64
"""Largest number of references and combinations within one another."""
_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)
_WITHIN_SLASHES = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
"""Replacements for the characters that cannot stand in a regular expression between slashes."""


def is_of_type(value: object, json_type: str) -> bool:
    """Return whether a value has a JSON type; Python's booleans are integers, JSON's are not."""
    if isinstance(value, bool) and json_type != "boolean":
        return False
    return isinstance(value, PYTHON_TYPES[json_type])


class ArgumentSchemas:
    """Schemas of the arguments of a tool by name, with their types and the rules of strings.

    The work is linear in the size of the tool's schema, however often parts refer to each other.

    Args:
        schema: JSON Schema of the arguments.
    """

    def __init__(self, schema: Schema) -> None:
        self._root = schema
        self._listed: dict[str, list[object]] = {}
        self._additional: list[object] = []
        required: set[object] = set()
        for part in _parts(schema, schema):
            properties = part.get("properties")
            if isinstance(properties, Mapping):
                for name, value in properties.items():
                    self._listed.setdefault(name, []).append(value)
            self._additional.append(part.get("additionalProperties"))
            if isinstance(part.get("required"), list):
                required.update(name for name in part["required"] if isinstance(name, str))
        self.names = {name: name in required for name in self._listed}
        """Names of the arguments; True for those that are required."""
        self._schemas: dict[str, Schema] = {}
        self._types: dict[int, frozenset[str]] = {}
        self._values: dict[int, dict[str, None]] = {}

    def find(self, name: str) -> Schema:
        """Return the schema of an argument; an empty one for no restriction."""
        if name not in self._schemas:
            parts = self._listed.get(name, self._additional)
            kept = [part for part in parts if isinstance(part, Mapping)]
            combined: Schema = {"allOf": kept} if kept else {}
            self._schemas[name] = kept[0] if len(kept) == 1 else combined
        return self._schemas[name]

    def find_types(self, name: str) -> frozenset[str]:
        """Return the JSON types that an argument may have; all of them if its schema has none."""
        return self._find_types(self.find(name), 0)

    def find_string_rules(self, name: str) -> "StringRules":
        """Return the rules for the text of an argument that is a string."""
        return StringRules(_parts(self.find(name), self._root), self._values)

    def _find_types(self, schema: object, depth: int) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return ALL_TYPES
        known, key = self._types, id(schema)
        if key in known:
            return known[key]
        known[key] = ALL_TYPES  # of a circle of references
        types = _declared_types(schema)
        parts = [resolve_reference(self._root, schema["$ref"])] if "$ref" in schema else []
        parts += schema["allOf"] if isinstance(schema.get("allOf"), list) else []
        for part in parts:
            types &= self._find_types(part, depth + 1)
        for keyword in ("anyOf", "oneOf"):
            alternatives = schema.get(keyword)
            if isinstance(alternatives, list) and alternatives:
                found = [self._find_types(each, depth + 1) for each in alternatives]
                types &= frozenset().union(*found)
        known[key] = types
        return types


def _declared_types(schema: Schema) -> frozenset[str]:
    """Return the types that `type`, `const` and `enum` permit."""
    declared, types = schema.get("type"), ALL_TYPES
    names = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        names = {name for name in declared if isinstance(name, str)}
    if names & ALL_TYPES:
        types &= names | ({"integer"} if "number" in names else set())
    values = schema.get("enum")
    values = values if isinstance(values, list) else []
    values = [schema["const"]] if "const" in schema else values
    if values:
        types &= {name for value in values for name in ALL_TYPES if is_of_type(value, name)}
    return types


def _parts(schema: Schema, root: Schema) -> Iterator[Schema]:
    """Yield a schema and those that it combines by `$ref` and `allOf`."""
    pending: list[object] = [schema]
    seen: set[int] = set()
    while pending:
        part = pending.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if isinstance(part.get("allOf"), list):
            pending += part["allOf"]
        if "$ref" in part:
            pending.append(resolve_reference(root, part["$ref"]))


class StringRules:
    """Rules of a schema for the text of a string: its values, patterns and lengths.

    Args:
        parts: The schemas that the string has to match.
        known_values: The strings of each list of values, by the list's id; is extended.
    """

    def __init__(self, parts: Iterable[Schema], known_values: dict[int, dict[str, None]]) -> None:
        self.values: dict[str, None] | None = None
        """The only values; None for any."""
        self.expressions: list[str] = []
        """Regular expressions between slashes, all of which match the text."""
        self.unsupported: set[str] = set()
        """Keywords that have no such expression."""
        self._known_values = known_values
        for part in parts:
            self._add(part)

    def _add(self, part: Schema) -> None:
        if isinstance(part.get("enum"), list):
            self._restrict(self._strings_in(part["enum"]))
        if "const" in part:
            self._restrict(_strings([part["const"]]))
        for keyword in ("anyOf", "oneOf"):
            if isinstance(part.get(keyword), list):
                lists = [_listed_values(each) for each in part[keyword]]
                if None in lists:
                    self.unsupported.add(keyword)
                else:
                    self._restrict(_strings(chain.from_iterable(filter(None, lists))))
        if isinstance(part.get("pattern"), str):
            self.expressions.append(_search_expression(part["pattern"]))
        shortest, longest = part.get("minLength", 0), part.get("maxLength", "")
        if (shortest, longest) != (0, ""):
            self.expressions.append(f"/(.|\\n){{{shortest},{longest}}}/")
        self.unsupported |= part.keys() & {"format", "not"}

    def _strings_in(self, values: list[Any]) -> dict[str, None]:
        if id(values) not in self._known_values:
            self._known_values[id(values)] = _strings(values)
        return self._known_values[id(values)]

    def _restrict(self, values: dict[str, None]) -> None:
        if self.values is not None:
            fewer, more = sorted((self.values, values), key=len)
            values = {value: None for value in fewer if value in more}
        self.values = values


def _strings(values: Iterable[object]) -> dict[str, None]:
    return {value: None for value in values if isinstance(value, str)}


def _listed_values(schema: object) -> list[Any] | None:
    """Return the values that fit a schema of an alternative; None if it does not list them."""
    if not isinstance(schema, Mapping) or schema.keys() - ANNOTATIONS - {"enum", "const", "type"}:
        return None
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _search_expression(pattern: str) -> str:
    """Return the expression of a text in which a pattern of JSON Schema matches somewhere."""
    alternatives = []
    for alternative in split_alternatives(pattern):
        core = strip_anchors(alternative)
        before = "" if alternative.startswith("^") else r"(.|\n)*"
        after = "" if alternative.endswith(f"{core}$") else r"(.|\n)*"
        alternatives.append(f"{before}({core}){after}")
    text = "|".join(alternatives)
    return "/" + _SLASH.sub(lambda match: _WITHIN_SLASHES.get(match[0], match[0]), text) + "/"
