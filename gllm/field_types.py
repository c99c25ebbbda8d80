"""Conversion of values that a caller passes to the types of the fields that receive them.

Converts equivalent types, numpy's numbers and arrays among them, and refuses the others by the
field's name. A converted value has exactly the annotated type, so that it can be encoded as a
message. Ranges are checked by the owner of the field.
"""

import dataclasses
import numbers
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

Converter = Callable[[str, Any], Any]


class FieldError(ValueError):
    """A value that a field does not accept. `param` is the field's name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def convert_fields(instance: Any) -> None:
    """Convert the fields of a dataclass in place, frozen ones too. Raises FieldError."""
    config: type = type(instance)
    exact = _exact_types(config)
    for name, convert in _converters(config).items():
        value = getattr(instance, name)
        if type(value) in exact[name]:
            continue
        converted = convert(name, value)
        if converted is not value:
            object.__setattr__(instance, name, converted)


def convert_values(config: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert keyword arguments of a dataclass; unknown names stay as they are.

    Raises FieldError.
    """
    converters = _converters(config)
    return {
        name: converters[name](name, value) if name in converters else value
        for name, value in values.items()
    }


def to_int(name: str, value: Any) -> int:
    """Return an integer exactly; booleans and floats are refused, 3.0 too. Raises FieldError."""
    if type(value) is int:
        return value
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise _type_error(name, value, "an integer")


def to_float(name: str, value: Any) -> float:
    """Return a real number as a float; booleans and strings are refused. Raises FieldError."""
    if type(value) is float:
        return value
    if type(value) is not bool and isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:
            pass
    raise _type_error(name, value, "a number")


def to_bool(name: str, value: Any) -> bool:
    """Return a boolean; 0 and 1 are refused. Raises FieldError."""
    if isinstance(value, bool):
        return value
    if getattr(value, "shape", None) == () and getattr(value.dtype, "kind", "") == "b":
        return bool(value)
    raise _type_error(name, value, "True or False")


def to_str(name: str, value: Any) -> str:
    """Return a string that can be encoded as UTF-8. Raises FieldError."""
    if not isinstance(value, str):
        raise _type_error(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _type_error(name, value, "a string without lone surrogates") from None
    return str.__str__(value)


def to_ints(name: str, values: Any) -> tuple[int, ...]:
    """Return integers, of an array too, as a tuple; None is an empty one. Raises FieldError."""
    if type(values) is tuple and {int}.issuperset(map(type, values)):
        return values
    return _to_tuple(to_int, name, values)


def to_token_ids(name: str, values: Any) -> list[int]:
    """Return the token ids of a prompt: a list, or any iterable of integers. Raises FieldError."""
    if type(values) is list and {int}.issuperset(map(type, values)):
        return values
    return list(_to_tuple(to_int, name, () if values is None else values))


def _to_tuple(convert: Converter, name: str, values: Any) -> tuple[Any, ...]:
    """Return the converted items of an iterable; None is an empty one, a string is one item."""
    if values is None:
        return ()
    if isinstance(values, str):
        values = [values]
    # Items of an array become Python's numbers at once; a scalar array stays a scalar.
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, bytes | bytearray | memoryview | Mapping) or not isinstance(
        values, Iterable
    ):
        raise _type_error(name, values, "a sequence")
    return tuple(convert(f"{name}[{index}]", item) for index, item in enumerate(values))


def _to_bias(name: str, values: Any) -> dict[int, float]:
    """Return a mapping from token ids to numbers as a dictionary; None is an empty one."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise _type_error(name, values, "a mapping from token ids to numbers")
    return {
        to_int(f"{name}'s key", key): to_float(f"{name}[{key!r}]", value)
        for key, value in values.items()
    }


@cache
def _converters(config: type) -> dict[str, Converter]:
    """Return the converter of each field of a dataclass, by its annotation."""
    hints = typing.get_type_hints(config)
    return {field.name: _converter(hints[field.name]) for field in dataclasses.fields(config)}


@cache
def _exact_types(config: type) -> dict[str, frozenset[type]]:
    """Return the types of each field whose values need no conversion."""
    scalars = {int, float, bool, type(None)}
    hints = typing.get_type_hints(config)
    return {name: frozenset(scalars.intersection(_members(hint))) for name, hint in hints.items()}


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union; any other type alone."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


SIMPLE: dict[Any, Converter] = {
    int: to_int,
    float: to_float,
    bool: to_bool,
    str: to_str,
    tuple[int, ...]: to_ints,
    tuple[str, ...]: lambda name, values: _to_tuple(to_str, name, values),
    Mapping[int, float]: _to_bias,
}


def _converter(hint: Any) -> Converter:
    """Return the converter to a type: one of SIMPLE, a class, or one of them or None."""
    if hint in SIMPLE:
        return SIMPLE[hint]
    members = _members(hint)
    others = [member for member in members if member is not type(None)]
    if len(others) == 1 and others != [hint]:
        convert = _converter(others[0])
        return lambda name, value: None if value is None else convert(name, value)
    classes = tuple(typing.get_origin(member) or member for member in members)
    return lambda name, value: _to_instance(classes, name, value)


def _to_instance(classes: tuple[type, ...], name: str, value: Any) -> Any:
    if not isinstance(value, classes):
        names = " or ".join(kind.__name__ for kind in classes if kind is not type(None))
        raise _type_error(name, value, f"of type {names}")
    return value


def _type_error(name: str, value: Any, rule: str) -> FieldError:
    """Return the error of a value of another type; its name begins with the field's."""
    param = name.partition("[")[0].partition("'")[0]
    kind = type(value).__name__
    return FieldError(param, f"{name} is {shortened(value)} ({kind}), but has to be {rule}")


def shortened(value: Any) -> str:
    """Return the beginning of a value's representation, for messages."""
    try:
        return f"{value!r:.200}"
    except ValueError:  # an integer of thousands of digits
        return "too long"
