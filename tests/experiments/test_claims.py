"""Claims are judged by sign and by size."""

import math

import pytest

from experiments.base import claims_table
from experiments.claims import (
    ClaimVerdict,
    ExpectedChange,
    ExpectedDirection,
    ExpectedFigure,
    ExpectedLimit,
    PaperClaim,
    relative_change,
)


@pytest.mark.parametrize(
    ("claimed", "ours", "same_sign", "same_size"),
    [
        (ExpectedChange(0.22), 30.45, True, False),  # +3,045 % does not confirm +22 %.
        (ExpectedChange(0.22), 0.22, True, True),
        (ExpectedChange(0.22), 0.11, True, True),
        (ExpectedChange(0.22), 0.44, True, True),
        (ExpectedChange(0.22), 0.109, True, False),
        (ExpectedChange(0.22), 0.441, True, False),
        (ExpectedChange(0.22), -0.22, False, False),
        (ExpectedChange(0.22), 0.0, False, False),
        (ExpectedChange(0.002), 0.002, False, False),  # Shown as 0 %, so it has no sign.
        (ExpectedChange(-0.10), -0.06, True, True),
        (ExpectedChange(-0.10), 0.10, False, False),
        (ExpectedChange(0.29, 1.5), 0.15, True, True),
        (ExpectedChange(0.29, 1.5), 3.0, True, True),
        (ExpectedChange(0.29, 1.5), 0.14, True, False),
        (ExpectedChange(-0.86, -0.08), -0.9, True, True),
        (ExpectedChange(-0.86, -0.08), -0.03, True, False),
        (ExpectedChange(0.22), math.inf, True, False),
    ],
)
def test_changes(claimed: ExpectedChange, ours: float, same_sign: bool, same_size: bool) -> None:
    assert claimed.judge(ours) == ClaimVerdict(same_sign, same_size, same_sign and same_size)


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.1), (0.2, 0.1), (0.0, None), (0.0, 0.1)])
def test_range_of_two_signs_is_refused(low: float, high: float | None) -> None:
    with pytest.raises(ValueError, match="no range of changes of one sign"):
        ExpectedChange(low, high)


def test_directions() -> None:
    assert ExpectedDirection(True, "higher").judge(0.3) == ClaimVerdict(True, None, True)
    assert ExpectedDirection(True, "higher").judge(0.001) == ClaimVerdict(False, None, False)
    assert ExpectedDirection(False, "lower").judge(-0.3).is_met
    assert not ExpectedDirection(False, "lower").judge(0.3).is_met


def test_limits_and_figures() -> None:
    assert ExpectedLimit(0.15).judge(0.15) == ClaimVerdict(None, None, True)
    assert not ExpectedLimit(0.15).judge(0.151).is_met
    assert ExpectedLimit(0.95, is_minimum=True).judge(0.95).is_met
    assert not ExpectedLimit(0.95, is_minimum=True).judge(0.949).is_met
    assert ExpectedFigure(4.0, "s").judge(8.0) == ClaimVerdict(None, True, True)
    assert ExpectedFigure(4.0, "s").judge(1.9) == ClaimVerdict(None, False, False)


@pytest.mark.parametrize(
    ("claim", "cells"),
    [
        (PaperClaim("q", ExpectedChange(0.22), 30.45),
         ["q", "+22 %", "+3045 %", "yes", "no", "**miss**"]),
        (PaperClaim("q", ExpectedChange(1.0, 5.0, is_ratio=True), 1.5, "so far"),
         ["q", "2.00 x to 6.00 x", "2.50 x so far", "yes", "yes", "yes"]),
        (PaperClaim("q", ExpectedChange(0.79, comment="against vLLM"), -0.1),
         ["q", "+79 % against vLLM", "-10 %", "no", "no", "**miss**"]),
        (PaperClaim("q", ExpectedDirection(False, "lower"), -0.2),
         ["q", "lower", "-20 %", "yes", "-", "yes"]),
        (PaperClaim("q", ExpectedLimit(1.1, unit="x", digits=2), 1.09),
         ["q", "aim: <= 1.10 x", "1.09 x", "-", "-", "yes"]),
        (PaperClaim("q", ExpectedFigure(9.29, "s", 2), 1.44),
         ["q", "9.29 s", "1.44 s", "-", "no", "**miss**"]),
        (PaperClaim("q", "a plot without numbers", None, "2 x at least"),
         ["q", "a plot without numbers", "2 x at least", "-", "-", "-"]),
        (PaperClaim("q", ExpectedChange(0.79), None, "never"),
         ["q", "+79 %", "never", "-", "-", "-"]),
    ],
)  # fmt: skip
def test_rows_of_the_table(claim: PaperClaim, cells: list[str]) -> None:
    header, _, row = claims_table([claim]).splitlines()
    assert [cell.strip() for cell in row.strip("|").split("|")] == cells
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    assert columns == ["", "claimed", "ours", "same sign", "within 2 x", "met"]


def test_changes_from_nothing() -> None:
    assert relative_change(6, 4) == pytest.approx(0.5)
    assert relative_change(6, 0) == math.inf
    assert relative_change(0, 0) == 0
