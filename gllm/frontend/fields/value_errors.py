"""Errors of fields: the path of the value, the value received, and the values allowed."""

import re
from functools import lru_cache
from typing import Any, NoReturn

import msgspec

from gllm.options.field_types import FieldError

_MAX_SHOWN_CHARACTERS = 100
"""Maximum number of characters of a string in an error message."""
_TYPE_NAMES = {dict: "an object", list: "a list", type(None): "missing"}


def raise_field_error(path: str, rule: str, value: object = None) -> NoReturn:
    """Raise the FieldError of an invalid JSON value, with the allowed values in the message.

    Args:
        path: Path of the value: its field, then keys and indices, such as `input[3].content[0]`.
        rule: The allowed values; continues the sentence "... has to be".
        value: The value received; None if it is missing.
    """
    message = f"{path} is {describe_value(value)}, but has to be {rule}"
    raise FieldError(_field_name(path), message)


def raise_unsupported(
    path: str, message: str, error_class: type[FieldError] = FieldError
) -> NoReturn:
    """Raise the FieldError of a JSON value that the API allows and this server does not support.

    Args:
        path: Path of the value in the request body, such as `input[3].content[0]`.
        message: Rest of a sentence that starts with the path, such as "is not supported".
        error_class: Class of the error.
    """
    raise error_class(_field_name(path), f"{path} {message}")


def describe_value(value: object) -> str:
    """Return a JSON value as text for an error message; for lists and objects only the type."""
    if isinstance(value, str):
        value = value[:_MAX_SHOWN_CHARACTERS]
        return msgspec.json.encode(value.encode("utf-8", "replace").decode()).decode()
    if type(value) in _TYPE_NAMES:
        return _TYPE_NAMES[type(value)]
    if isinstance(value, bool):
        return "true" if value else "false"
    # An integer may have thousands of digits.
    return f"{value}" if isinstance(value, float) or _is_short(value) else "a very large number"


def to_field_error(
    message: str, values: dict[str, Any], schema: type[msgspec.Struct]
) -> FieldError:
    """Convert msgspec's error message about a request body to a FieldError with the field's path.

    Args:
        message: Text of the msgspec error.
        values: The request body.
        schema: Class of the request body.
    """
    reason, _, location = message.partition(" - at `")
    path = location.partition("$.")[2].removesuffix("`")
    name = _field_name(path)
    if reason.startswith("Invalid enum value"):
        value, allowed = _find_value(values, path), _allowed_values(schema, path)
        return FieldError(
            name, f"{path} is {describe_value(value)}, but has to be one of {', '.join(allowed)}"
        )
    if reason.startswith("Expected "):
        rule, _, received_type = reason.removeprefix("Expected ").partition(", got ")
        rule = rule.replace(" | null`", "`")
        if location.startswith("key`"):
            return FieldError(name, f"a key of {path} has to be {rule}")
        if "..." in path:
            return FieldError(name, f"{path} is of type {received_type}, but has to be {rule}")
        value = describe_value(_find_value(values, path))
        return FieldError(name, f"{path} is {value}, but has to be {rule}")
    return FieldError(name, f"{path}: {reason}")


def _field_name(path: str) -> str:
    """Return the first part of a path."""
    return re.split(r"\W", path, maxsplit=1)[0]


def _is_short(value: object) -> bool:
    """Return True for integers that Python converts to a string without an error."""
    return isinstance(value, int) and value.bit_length() < 1000


def _find_value(values: Any, path: str) -> object:
    """Return the value at a path; None if there is none."""
    for key, index in re.findall(r"(\w+)|\[(\d+)\]", path):
        if key and isinstance(values, dict):
            values = values.get(key)
        elif index and isinstance(values, list) and int(index) < len(values):
            values = values[int(index)]
        else:
            return None
    return values


@lru_cache(maxsize=256)
def _allowed_values(schema: type[msgspec.Struct], path: str) -> list[str]:
    """Return the values of the enumeration at a path of a schema, for an error message."""
    (root,), components = msgspec.json.schema_components([schema], ref_template="{name}")
    members = [root]
    for key in re.findall(r"\w+", path):
        members = [
            member["properties"][key]
            for member in _resolve(members, components)
            if key in member.get("properties", {})
        ]
    return [
        value
        for member in _resolve(members, components)
        for value in member.get("enum", ())
        if value is not None
    ]


def _resolve(members: list[dict[str, Any]], components: dict[str, Any]) -> list[dict[str, Any]]:
    """Return JSON Schemas with their references and unions replaced by what they refer to."""
    resolved = []
    for member in members:
        if "anyOf" in member:
            resolved += _resolve(member["anyOf"], components)
        elif "$ref" in member:
            resolved += _resolve([components[member["$ref"]]], components)
        else:
            resolved.append(member)
    return resolved
