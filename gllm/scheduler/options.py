"""Declare the fields of configuration dataclasses: flag, help text, and the range of a number.

Owns the range checks of every configuration. `gllm.flags` makes the command-line flags.
"""

import dataclasses
import functools
import math
import operator
import typing
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

INT32_MAX = 2**31 - 1
MAX_SECONDS = 1e8
"""Longest time-out, about three years: timers of the event loop overflow far above it."""


@dataclass(frozen=True)
class Range:
    """The permitted values of a number, by the names of `msgspec.Meta`: ge, gt, le, lt."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    allows_inf: bool = False

    def __contains__(self, value: float) -> bool:
        """Return whether a number is in the range; NaN never is."""
        if math.isnan(value) or (math.isinf(value) and not self.allows_inf):
            return False
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    @property
    def is_bounded(self) -> bool:
        """Whether both ends are limited, infinity counting as a limit where it is permitted."""
        lower = self.ge is not None or self.gt is not None
        return lower and (self.le is not None or self.lt is not None or self.allows_inf)

    def __str__(self) -> str:
        """Return the rule: `0..65535`, `>= 1`, `in (0, 1]`, `>= 0 and finite`."""
        low = self.ge if self.ge is not None else self.gt
        high = self.le if self.le is not None else self.lt
        if low is None or high is None:
            text = "" if low is None else f"{'>=' if self.ge is not None else '>'} {low:g}"
            return text or ("any" if high is None else f"<= {high:g}")
        begin, end = ("(", "["), (")", "]")
        edges = begin[self.ge is not None], end[self.le is not None]
        return f"in {edges[0]}{_short(low)}, {_short(high)}{edges[1]}"


def option(
    default: Any,
    text: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    allows_inf: bool = False,
    **more: Any,
) -> Any:
    """Declare a dataclass field with a flag.

    text: the flag's help.
    ge, gt, le, lt: range of a number, or of each number of a tuple.
    allows_inf: infinity is permitted.
    more: `choices`, `flags`, `parse`, `repeat`.
    """
    metadata = {"help": text, **more}
    bounds = (ge, gt, le, lt)
    if any(bound is not None for bound in bounds) or allows_inf:
        metadata["range"] = Range(*bounds, allows_inf)
    return field(default=default, metadata=metadata)


def check_values(config: Any) -> None:
    """Check the numbers and switches of a configuration, and convert those of other number types.

    Raises ValueError that names the field and what it has to be, also for a value of another type.
    """
    for name in _switches(typing.cast(Hashable, type(config))):
        if not isinstance(getattr(config, name), bool):
            raise ValueError(f"{name} is {getattr(config, name)!r:.100}, but has to be a bool")
    for name, kind, allowed in _numbers(typing.cast(Hashable, type(config))):
        value = getattr(config, name)
        if value is None:
            continue
        many = isinstance(value, (tuple, list))
        numbers = tuple(_number(name, kind, one, allowed) for one in (value if many else (value,)))
        # Configurations are frozen; this happens while they are made.
        object.__setattr__(config, name, numbers if many else numbers[0])


def _number(name: str, kind: type, value: Any, allowed: Range) -> float:
    """Return the value as `kind`. Raises ValueError."""
    is_number = not isinstance(value, (bool, str, bytes))
    try:
        number = (operator.index if kind is int else float)(value) if is_number else None
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or number not in allowed:
        raise ValueError(f"{name} is {value!r:.100}, but has to be {describe(kind, allowed)}")
    return number


def describe(kind: type, allowed: Range) -> str:
    """Return the rule for a number of a type, as `an integer in [0, 65535]`."""
    return f"{'an integer' if kind is int else 'a number'} {allowed}"


def number_kind(hint: Any) -> type | None:
    """Return int or float where a type hint is or contains it: `int | None`, `tuple[int, ...]`."""
    if hint in (int, float):
        return hint
    return next((kind for part in typing.get_args(hint) if (kind := number_kind(part))), None)


@functools.cache
def _numbers(config: Hashable) -> list[tuple[str, type, Range]]:
    """Return name, type and range of each field of a class with a range."""
    assert isinstance(config, type)
    hints = typing.get_type_hints(config)
    return [
        (spec.name, number_kind(hints[spec.name]) or float, spec.metadata["range"])
        for spec in dataclasses.fields(config)
        if "range" in spec.metadata
    ]


@functools.cache
def _switches(config: Hashable) -> list[str]:
    """Return the fields of a class that are true or false."""
    assert isinstance(config, type)
    hints = typing.get_type_hints(config)
    return [spec.name for spec in dataclasses.fields(config) if hints[spec.name] is bool]


def _short(bound: float) -> str:
    """Return a bound as text: 2^31 - 1 and its like as powers of two."""
    if isinstance(bound, int) and bound >= 2**31 - 1:
        exponent = (bound + 1).bit_length() - 1
        if bound in (2**exponent - 1, 2**exponent):
            return f"2^{exponent}" + ("" if bound == 2**exponent else " - 1")
    return f"{bound:g}" if isinstance(bound, float) else str(bound)
