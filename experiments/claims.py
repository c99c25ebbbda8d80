"""Claims of a paper beside our figures: sign and size are judged apart.

A figure far beyond the claimed one is a miss, even if its sign is right: +3,045 % does not confirm
+22 %.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

SIZE_FACTOR = 2.0
"""A figure has the claimed size within this factor."""
NO_CHANGE = 0.005
"""Relative changes smaller than this have no sign: they are shown as 0 %."""


class ClaimVerdict(NamedTuple):
    """Comparison of our figure with a claim; None where the claim does not determine it."""

    same_sign: bool | None = None
    same_size: bool | None = None
    """True within SIZE_FACTOR."""
    is_met: bool | None = None
    """True if everything that the claim determines agrees."""


class Expectation(Protocol):
    """Figure, range, direction or limit that a claim states; `str` returns it as text."""

    def judge(self, ours: float) -> ClaimVerdict:
        """Compare our figure with the claim."""

    def show(self, ours: float) -> str:
        """Format our figure in the claim's unit."""


@dataclass(frozen=True)
class ExpectedChange:
    """Relative change of a figure that the paper reports, or a range of changes.

    The size agrees if our change is at least half of the smallest and at most twice the largest.

    Raises:
        ValueError: The range contains no change at all, or is empty.
    """

    low: float
    """-0.1: 10 % less."""
    high: float | None = None
    """None: the same as `low`."""
    is_ratio: bool = False
    """Shown as a ratio: 1.1 x instead of +10 %."""
    comment: str = ""
    """Text behind the figures, such as the setting that they belong to."""

    def __post_init__(self) -> None:
        low, high = self._range()
        if low > high or low * high <= 0:
            raise ValueError(f"{low}..{high} is no range of changes of one sign")

    def judge(self, ours: float) -> ClaimVerdict:
        """Compare the sign, then the size."""
        low, high = self._range()
        same_sign = math.copysign(1, ours) == math.copysign(1, low) and abs(ours) >= NO_CHANGE
        smallest, largest = sorted((abs(low), abs(high)))
        same_size = same_sign and smallest / SIZE_FACTOR <= abs(ours) <= largest * SIZE_FACTOR
        return ClaimVerdict(same_sign, same_size, same_sign and same_size)

    def show(self, ours: float) -> str:
        """Return `+10 %`, or `1.10 x`."""
        return f"{ours + 1:.2f} x" if self.is_ratio else f"{100 * ours:+.0f} %"

    def __str__(self) -> str:
        low, high = self._range()
        shown = self.show(low) if low == high else f"{self.show(low)} to {self.show(high)}"
        return f"{shown}{self.comment and ' '}{self.comment}"

    def _range(self) -> tuple[float, float]:
        return self.low, self.low if self.high is None else self.high


@dataclass(frozen=True)
class ExpectedDirection:
    """Direction of a change without a number; `text` is the paper's word."""

    is_rise: bool
    text: str

    def judge(self, ours: float) -> ClaimVerdict:
        """Compare the sign of our relative change."""
        same_sign = ours > NO_CHANGE if self.is_rise else ours < -NO_CHANGE
        return ClaimVerdict(same_sign, None, same_sign)

    def show(self, ours: float) -> str:
        """Return the change in per cent."""
        return f"{100 * ours:+.0f} %"

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ExpectedLimit:
    """Limit that our figure has to keep: an aim, or a bound that the paper states."""

    limit: float
    is_minimum: bool = False
    unit: str = "%"
    """`%` shows a share in per cent; other units stand behind the figure."""
    digits: int = 1
    name: str = "aim"
    """Word in front of the limit."""

    def judge(self, ours: float) -> ClaimVerdict:
        """Check the limit; sign and size are not compared."""
        kept = ours >= self.limit if self.is_minimum else ours <= self.limit
        return ClaimVerdict(None, None, kept)

    def show(self, ours: float) -> str:
        """Return the figure with its unit."""
        return _with_unit(ours, self.unit, self.digits)

    def __str__(self) -> str:
        sign = ">=" if self.is_minimum else "<="
        return f"{self.name}: {sign} {self.show(self.limit)}"


@dataclass(frozen=True)
class ExpectedFigure:
    """Positive figure of the paper, such as seconds; only the size is compared."""

    value: float
    unit: str
    digits: int = 1

    def judge(self, ours: float) -> ClaimVerdict:
        """Compare the size."""
        same_size = self.value / SIZE_FACTOR <= ours <= self.value * SIZE_FACTOR
        return ClaimVerdict(None, same_size, same_size)

    def show(self, ours: float) -> str:
        """Return the figure with its unit."""
        return _with_unit(ours, self.unit, self.digits)

    def __str__(self) -> str:
        return self.show(self.value)


@dataclass(frozen=True)
class PaperClaim:
    """A claim beside our figure."""

    quantity: str
    paper: Expectation | str
    """A text where there is nothing to compare with, such as a plot without numbers."""
    ours: float | None = None
    """Our figure, as the expectation counts it: changes and shares as fractions."""
    note: str = ""
    """Text in place of the figure, or behind it."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Figures of other runs as text, by title of their column."""

    @property
    def verdict(self) -> ClaimVerdict:
        """Comparison of our figure with the claim; empty where one of them is missing."""
        if isinstance(self.paper, str) or self.ours is None:
            return ClaimVerdict()
        return self.paper.judge(self.ours)

    @property
    def shown(self) -> str:
        """Our figure as text."""
        if isinstance(self.paper, str) or self.ours is None:
            return self.note
        return f"{self.paper.show(self.ours)}{self.note and ' '}{self.note}"


def join_claims(
    claims: Sequence[PaperClaim], columns: Mapping[str, Sequence[PaperClaim]]
) -> list[PaperClaim]:
    """Return the claims with the figures of other runs beside them, by title of their column.

    The claims of a column have the same order.
    """
    return [
        replace(claim, beside={title: others[index].shown for title, others in columns.items()})
        for index, claim in enumerate(claims)
    ]


def relative_change(value: float, base: float) -> float:
    """Return the change from a base to a value; infinite where the base is 0."""
    if base == 0:
        return math.inf if value else 0.0
    return value / base - 1


def _with_unit(value: float, unit: str, digits: int) -> str:
    factor = 100 if unit == "%" else 1
    return f"{factor * value:.{digits}f} {unit}".strip()
