"""Parametrization by pairwise designs: every pair of values of two axes occurs in some case.

A full product of four axes finds hardly more faults than a design that covers every pair, with a
tenth of its cases. `make test-long` runs the full product.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import settings

from tests.support.examples import LONG_PROFILE

Row = tuple[int, ...]
Pair = tuple[int, int, int, int]
"""First axis and its value, second axis and its value, all as indices."""


def pairs_of(row: Row) -> set[Pair]:
    """Return the pairs of values that a case covers."""
    return {(a, row[a], b, row[b]) for a, b in combinations(range(len(row)), 2)}


def pairwise_rows(rows: Sequence[Row], first: Iterable[Row] = ()) -> list[Row]:
    """Choose rows that cover every pair that occurs in `rows`, greedily and always the same ones.

    Args:
        rows: The allowed cases, as indices of values.
        first: Cases that are chosen in any case.
    """
    chosen = list(dict.fromkeys(first))
    pending = {row: pairs_of(row) for row in rows}
    missing = set().union(*pending.values()) if pending else set()
    if rows and len(rows[0]) == 1:
        return list(rows)
    for row in chosen:
        missing -= pairs_of(row)
    while missing:
        best = max(pending, key=lambda row: len(pending[row] & missing))
        chosen.append(best)
        missing -= pending.pop(best)
        pending = {row: left for row, pairs in pending.items() if (left := pairs & missing)}
    return chosen


def covers_pairs(
    corners: Sequence[tuple[Any, ...]] = (),
    allowed: Callable[..., bool] | None = None,
    **axes: Sequence[Any],
) -> pytest.MarkDecorator:
    """Parametrize a test by a pairwise design; the long profile runs the full product.

    Args:
        corners: Cases that run in any case, such as one that failed once, in the order of `axes`.
        allowed: Returns True for the cases that make sense; called with the names of the axes.
        axes: The values of each parameter of the test.
    """
    names, values = list(axes), [list(axis) for axis in axes.values()]
    rows = [
        row
        for row in product(*(range(len(axis)) for axis in values))
        if allowed is None
        or allowed(**{name: values[at][row[at]] for at, name in enumerate(names)})
    ]
    kept = [
        tuple(axis.index(value) for axis, value in zip(values, corner, strict=True))
        for corner in corners
    ]
    marks = []
    if settings.get_current_profile_name() == LONG_PROFILE:
        marks = [pytest.mark.long]
    else:
        rows = pairwise_rows(rows, kept)
    cases = [
        pytest.param(*(axis[at] for axis, at in zip(values, row, strict=True)), marks=marks)
        for row in rows
    ]
    return pytest.mark.parametrize(names, cases)
