"""Confidence intervals of medians."""

import random

import pytest

from benchmarks.confidence import median_interval

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("count", "bounds"), [(1, (0, 0)), (5, (0, 4)), (6, (0, 5)), (15, (3, 11)), (20, (5, 14))]
)
def test_bounds_are_the_order_statistics_of_the_binomial(
    count: int, bounds: tuple[int, int]
) -> None:
    values = [float(value) for value in range(count)]
    random.Random(0).shuffle(values)
    assert median_interval(values) == bounds


def test_interval_covers_the_median_as_often_as_promised() -> None:
    rng = random.Random(0)
    draws = (median_interval([rng.expovariate(1.0) for _ in range(15)]) for _ in range(2000))
    covered = sum(low <= 0.6931 <= high for low, high in draws)
    assert covered / 2000 > 0.94


def test_no_values_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        median_interval([])
