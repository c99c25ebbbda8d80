"""Check the values of dataclass fields: convert them to the fields' types, refuse the others.

Converts equivalent types, numpy's numbers and arrays among them. A converted value has exactly the
annotated type, so that it can be encoded as a message. Ranges and choices are those that
`gllm.options.options` declares; the owner of the fields checks what depends on several of them.
"""

import dataclasses
import numbers
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from gllm.options.options import Range, describe_range, number_type_of

Converter = Callable[[str, Any], Any]


class FieldError(ValueError):
    """Error: a configuration or request field has an invalid value; `param` is the field's name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def convert_fields(instance: Any) -> None:
    """Convert the fields of a dataclass in place to their annotated types, and check their ranges.

    Works for frozen dataclasses, from their `__post_init__`. Types and ranges are those of the
    annotations and of `bounded_field`.

    Raises:
        FieldError: A field has a wrong type or is out of range.
    """
    config: type = type(instance)
    for name, default, convert in _field_converters(config):
        value = getattr(instance, name)
        if value is default:
            continue
        converted = convert(name, value)
        if converted is not value:
            object.__setattr__(instance, name, converted)


def to_int(name: str, value: Any) -> int:
    """Convert an integer of any library to int; booleans and floats, even 3.0, are refused.

    Args:
        name: Name of the field, for the error.
        value: Value of the field.

    Raises:
        FieldError: The value is not an integer.
    """
    if type(value) is int:
        return value
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise _type_error(name, value, "an integer")


def to_float(name: str, value: Any) -> float:
    """Convert a real number of any library to float; booleans and strings are refused.

    Args:
        name: Name of the field, for the error.
        value: Value of the field.

    Raises:
        FieldError: The value is not a real number.
    """
    if type(value) is float:
        return value
    if type(value) is not bool and isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:
            pass
    raise _type_error(name, value, "a number")


def to_bool(name: str, value: Any) -> bool:
    """Convert a boolean, also one of numpy, to bool; 0 and 1 are refused. Raises FieldError."""
    if isinstance(value, bool):
        return value
    if getattr(value, "shape", None) == () and getattr(value.dtype, "kind", "") == "b":
        return bool(value)
    raise _type_error(name, value, "True or False")


def to_str(name: str, value: Any) -> str:
    """Check that a value is a string without lone surrogates, and return it. Raises FieldError."""
    if not isinstance(value, str):
        raise _type_error(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _type_error(name, value, "a string without lone surrogates") from None
    return str.__str__(value)


def to_ints(name: str, values: Any) -> tuple[int, ...]:
    """Convert a sequence or array of integers to a tuple; None becomes (). Raises FieldError."""
    if type(values) is tuple and {int}.issuperset(map(type, values)):
        return values
    return _to_tuple(to_int, name, values)


def to_ints_or_str(name: str, value: Any) -> tuple[int, ...] | str:
    """Return a string unchanged; convert other values like `to_ints`. Raises FieldError."""
    return to_str(name, value) if isinstance(value, str) else to_ints(name, value)


def to_token_ids(name: str, values: Any) -> list[int]:
    """Convert token ids in any iterable or array to a list of int. Raises FieldError."""
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
def _field_converters(config: type) -> tuple[tuple[str, Any, Converter], ...]:
    """Return each field's name, the object that needs no conversion, and the field's converter.

    That object is the field's default, if converting it changes nothing.
    """
    hints = typing.get_type_hints(config)
    fields = []
    for spec in dataclasses.fields(config):
        convert = _field_converter(spec, hints[spec.name])
        default: Any = spec.default
        if default is not dataclasses.MISSING and convert(spec.name, default) is not default:
            default = dataclasses.MISSING
        fields.append((spec.name, default, convert))
    return tuple(fields)


def _field_converter(spec: "dataclasses.Field[Any]", hint: Any) -> Converter:
    """Return what converts and checks the values of a field."""
    convert = _converter(hint)
    if "range" in spec.metadata:
        convert = _with_range(convert, number_type_of(hint) or float, spec.metadata["range"])
    if "choices" in spec.metadata:
        convert = _with_choices(convert, spec.metadata["choices"])
    return _without_value(convert) if spec.metadata.get("secret") else convert


def _with_range(convert: Converter, kind: type, allowed: Range) -> Converter:
    """Return a converter that refuses numbers, or tuples of numbers, out of a range."""

    def check(name: str, value: Any) -> Any:
        number = convert(name, value)
        if isinstance(number, str):
            # A word in place of numbers, which the owner of the field checks.
            return number
        if isinstance(number, tuple):
            # The ends stand for all integers; NaN among floats has no place in an order.
            numbers = {min(number), max(number)} if number and kind is int else number
            fits = all(one in allowed for one in numbers)
        else:
            fits = number is None or number in allowed
        if not fits:
            raise constraint_error(name, number, describe_range(kind, allowed))
        return number

    return check


def _with_choices(convert: Converter, choices: tuple[str, ...]) -> Converter:
    """Return a converter that refuses all but some strings, and None if the type permits it."""

    def check(name: str, value: Any) -> Any:
        choice = convert(name, value)
        if choice is not None and choice not in choices:
            raise constraint_error(name, choice, f"one of {', '.join(choices)}")
        return choice

    return check


def _without_value(convert: Converter) -> Converter:
    """Return a converter whose errors do not show the value."""

    def check(name: str, value: Any) -> Any:
        try:
            return convert(name, value)
        except FieldError as error:
            message = f"{name} has a value that it cannot hold, not shown because it is secret"
            raise FieldError(error.param, message) from None

    return check


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union; any other type alone."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


SIMPLE: dict[Any, Converter] = {
    int: to_int,
    float: to_float,
    bool: to_bool,
    str: to_str,
    tuple[int, ...]: to_ints,
    tuple[int, ...] | str: to_ints_or_str,
    tuple[float, ...]: lambda name, values: _to_tuple(to_float, name, values),
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
    return FieldError(param, f"{name} is {shorten_repr(value)} ({kind}), but has to be {rule}")


def constraint_error(name: str, value: Any, rule: str) -> FieldError:
    """Return the FieldError for a value that is outside of its allowed range.

    Args:
        name: Name of the field.
        value: Value of the field.
        rule: Allowed range as text, such as `in [0, 2]`.
    """
    return FieldError(name, f"{name} is {shorten_repr(value)}, but has to be {rule}")


def shorten_repr(value: Any) -> str:
    """Return the beginning of a value's `repr` for error messages."""
    try:
        return f"{value!r:.200}"
    except ValueError:  # an integer of thousands of digits
        return "too long"
