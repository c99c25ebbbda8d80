"""Directions in the tables of the first MoLink paper, and those in which the simulation differs.

A direction is the sign of the change from one cell to another: between two systems in one row, or
between two rows of one system.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import exp, log, sqrt
from statistics import fmean
from typing import NamedTuple

from experiments.claims import NO_CHANGE, SIZE_FACTOR, relative_change
from experiments.weak_links_paper import ABLATION, LatencyRow

METRICS = ("ttft", "tpot", "e2el")
METRIC_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2EL"}
PAIRS = (("molink", "vllm"), ("molink", "helix"), ("helix", "vllm"))
"""System and the one that it is compared with."""

Figures = Callable[[LatencyRow, str], object]
"""Returns the simulated figures of a row and a system, with a field per name of METRICS."""


class Direction(NamedTuple):
    """A change in the paper and the same change in the simulation, as fractions."""

    kind: str
    name: str
    paper: float
    ours: float

    @property
    def agrees(self) -> bool:
        """True if both rise, or both fall, by at least NO_CHANGE."""
        return abs(self.ours) >= NO_CHANGE and (self.paper > 0) == (self.ours > 0)

    def __str__(self) -> str:
        return f"{self.name}: {100 * self.paper:+.1f} % in the paper, {100 * self.ours:+.1f} % here"


def compare_directions(
    rows: Sequence[LatencyRow], ours: Figures, ablation: Mapping[str, object]
) -> list[Direction]:
    """Return the directions of Tables 2 to 5, those without a change in the paper left out.

    Args:
        rows: Rows of Tables 2 to 4; inconsistent ones are left out.
        ours: Simulated figures.
        ablation: Simulated figures of Table 5, by system.
    """
    counted = [row for row in rows if not row.doubt]
    directions = [
        *_between_systems(counted, ours),
        *_between_rows(counted, ours),
        *_ablation(ablation),
    ]
    return [direction for direction in directions if abs(direction.paper) >= NO_CHANGE]


def _between_systems(rows: Sequence[LatencyRow], ours: Figures) -> Iterator[Direction]:
    for row in rows:
        for system, base in PAIRS:
            for metric in METRICS:
                yield _direction(
                    f"{system} against {base}",
                    f"Table {row.table}, {row.label}, {METRIC_NAMES[metric]} of {system} "
                    f"against {base}",
                    metric,
                    (row.cells[base], row.cells[system]),
                    (ours(row, base), ours(row, system)),
                )


def _between_rows(rows: Sequence[LatencyRow], ours: Figures) -> Iterator[Direction]:
    for before, after in pairwise(rows):
        if before.table != after.table:
            continue
        for system in before.cells:
            for metric in METRICS:
                yield _direction(
                    "along a table",
                    f"Table {after.table}, {METRIC_NAMES[metric]} of {system} "
                    f"from {before.label} to {after.label}",
                    metric,
                    (before.cells[system], after.cells[system]),
                    (ours(before, system), ours(after, system)),
                )


def _ablation(ours: Mapping[str, object]) -> Iterator[Direction]:
    for system in ("molink", "chunks only", "micro-batches only"):
        for metric in METRICS:
            yield _direction(
                "ablation",
                f"Table 5, {METRIC_NAMES[metric]} of {system} against neither",
                metric,
                (ABLATION["neither"], ABLATION[system]),
                (ours["neither"], ours[system]),
            )


def _direction(
    kind: str,
    name: str,
    metric: str,
    paper: tuple[object, object],
    ours: tuple[object, object],
) -> Direction:
    changes = [
        relative_change(getattr(after, metric), getattr(before, metric))
        for before, after in (paper, ours)
    ]
    return Direction(kind, name, *changes)


def mean_factor(rows: Sequence[LatencyRow], ours: Figures, system: str) -> float:
    """Return the factor by which a system's cells differ: from the mean square of the logarithms.

    Inconsistent rows are left out.
    """
    logarithms = [
        log(getattr(ours(row, system), metric) / getattr(row.cells[system], metric))
        for row in rows
        for metric in METRICS
        if not row.doubt
    ]
    return exp(sqrt(fmean(logarithm**2 for logarithm in logarithms)))


def far_cells(rows: Sequence[LatencyRow], ours: Figures) -> list[str]:
    """Return the cells that differ from the paper by more than a factor of SIZE_FACTOR."""
    cells = []
    for row in rows:
        if row.doubt:
            continue
        for system, cell in row.cells.items():
            for metric in METRICS:
                paper, simulated = getattr(cell, metric), getattr(ours(row, system), metric)
                if not paper / SIZE_FACTOR <= simulated <= paper * SIZE_FACTOR:
                    cells.append(
                        f"Table {row.table}, {row.label}, {METRIC_NAMES[metric]} of {system}: "
                        f"{paper:g} s in the paper, {simulated:.3g} s here"
                    )
    return cells
