"""Declare the fields of configuration dataclasses: flag, help text and range of numbers.

`field_types` checks values against the declarations; `flags` makes command-line flags from them.
"""

import math
import typing
from dataclasses import dataclass, field
from typing import Any

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_TIMEOUT_SECONDS = 1e8
"""Longest timeout in seconds, about three years; timers of the event loop overflow far above it."""


@dataclass(frozen=True)
class Range:
    """Allowed range of a number, with optional inclusive (ge, le) and exclusive (gt, lt) bounds."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    allows_inf: bool = False
    _low: float = field(init=False, repr=False, compare=False)
    _high: float = field(init=False, repr=False, compare=False)
    _excluded: tuple[float, ...] = field(init=False, repr=False, compare=False)
    """Numbers in [_low, _high] that are not in the range."""

    def __post_init__(self) -> None:
        lows = [bound for bound in (self.ge, self.gt) if bound is not None] or [-math.inf]
        highs = [bound for bound in (self.le, self.lt) if bound is not None] or [math.inf]
        low, high = max(lows), min(highs)
        excluded = [bound for bound in (self.gt, self.lt) if bound is not None]
        if not self.allows_inf:
            excluded += [bound for bound in (low, high) if math.isinf(bound)]
        object.__setattr__(self, "_low", low)
        object.__setattr__(self, "_high", high)
        object.__setattr__(self, "_excluded", tuple(excluded))

    def __contains__(self, value: float) -> bool:
        """Return True if a number is in the range; NaN never is."""
        return self._low <= value <= self._high and value not in self._excluded

    @property
    def is_bounded(self) -> bool:
        """True if both ends are bounded; infinity is an upper bound if it is permitted."""
        lower = self.ge is not None or self.gt is not None
        return lower and (self.le is not None or self.lt is not None or self.allows_inf)

    def __str__(self) -> str:
        """Return the range as text: `in [0, 65535]`, `in (0, 1]`, `>= 1`, `<= 5`."""
        low = self.ge if self.ge is not None else self.gt
        high = self.le if self.le is not None else self.lt
        if low is None or high is None:
            text = "" if low is None else f"{'>=' if self.ge is not None else '>'} {low:g}"
            return text or ("any" if high is None else f"<= {high:g}")
        begin, end = ("(", "["), (")", "]")
        edges = begin[self.ge is not None], end[self.le is not None]
        return f"in {edges[0]}{_short(low)}, {_short(high)}{edges[1]}"


class EntryChoices(tuple[str, ...]):
    """Allowed values of a field that also accepts `module:Class`, the name of a user-defined class.

    Command-line flags of servers accept only the listed values.
    """

    def __contains__(self, value: object) -> bool:
        """Return True for a choice and for the text of an entry, which need not exist."""
        if super().__contains__(value):
            return True
        module, colon, name = value.partition(":") if isinstance(value, str) else ("", "", "")
        return bool(colon) and all(part.isidentifier() for part in [*module.split("."), name])


def option(default: Any, text: str, **metadata: Any) -> Any:
    """Declare a dataclass field that has a command-line flag.

    Args:
        default: default value of the field.
        text: help text of the flag.
        metadata: arguments of `bounded_field`, and `bare` (value of a flag that is given without
            one), `choices`, `flags` (names), `is_common` (in the short help), `parse` (converter),
            `repeat` (may be given several times), `secret` (not in the `repr`).
    """
    return bounded_field(default, help=text, **metadata)


def bounded_field(
    default: Any,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    allows_inf: bool = False,
    **metadata: Any,
) -> Any:
    """Declare a dataclass field with an optional range; no command-line flag without `help`.

    Args:
        default: default value of the field.
        ge: least value of a number, or of each number of a tuple.
        gt: exclusive lower bound.
        le: greatest value.
        lt: exclusive upper bound.
        allows_inf: permit infinity.
        metadata: further metadata of the field, such as `help` or `choices`.
    """
    bounds = (ge, gt, le, lt)
    if any(bound is not None for bound in bounds) or allows_inf:
        metadata["range"] = Range(*bounds, allows_inf)
    return field(default=default, metadata=metadata, repr=not metadata.get("secret", False))


def describe_range(kind: type, allowed: Range) -> str:
    """Return a number type and a range as text, for example `an integer in [0, 65535]`."""
    return f"{'an integer' if kind is int else 'a number'} {allowed}"


def number_type_of(hint: Any) -> type | None:
    """Return int or float if a type hint is or contains it, as `int | None` does; else None."""
    if hint in (int, float):
        return hint
    return next((kind for part in typing.get_args(hint) if (kind := number_type_of(part))), None)


def _short(bound: float) -> str:
    """Return a bound as text, with 2^31 - 1, -2^63 and the like as powers of two."""
    if isinstance(bound, int) and abs(bound) >= INT32_MAX:
        sign, size = "-" if bound < 0 else "", abs(bound)
        exponent = (size + 1).bit_length() - 1
        if size in (2**exponent - 1, 2**exponent):
            return f"{sign}2^{exponent}" + ("" if size == 2**exponent else " - 1")
    return f"{bound:g}" if isinstance(bound, float) else str(bound)
