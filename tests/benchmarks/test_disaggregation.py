"""Benchmark of prefill and decode apart: the measured break-even and the page's verdicts."""

import pytest

from benchmarks.disaggregation.crossing import find_crossing
from benchmarks.disaggregation.page import format_crossing

pytestmark = pytest.mark.full


def test_crossing_is_between_the_lengths_where_the_faster_side_changes() -> None:
    assert find_crossing([(32, 3.0), (64, 1.0), (128, -1.0), (256, -5.0)]) == 96
    # Noise at small lengths: the last change counts.
    assert find_crossing([(32, 1.0), (64, -0.1), (128, 1.0), (256, -1.0)]) == 192
    assert find_crossing([(32, 3.0), (64, 1.0)]) is None
    assert find_crossing([(32, -1.0), (64, -2.0)]) == 32


@pytest.mark.parametrize(
    ("computed", "measured", "verdict"),
    [
        (100.0, 115.0, "13% (at most 20%: met)"),
        (None, None, "0% (at most 20%: met)"),
        (100.0, 150.0, "33% (at most 20%: **missed**)"),
        (100.0, None, "inf% (at most 20%: **missed**)"),
    ],
)
def test_a_break_even_is_met_within_a_fifth(
    computed: float | None, measured: float | None, verdict: str
) -> None:
    row = {"gigabytes": 0.4, "computed": computed, "measured": measured}
    text = format_crossing([{**row, "fetch_ms": {"32": 1.0}, "compute_ms": {"32": 2.0}}])
    assert f"Largest difference {verdict}" in text
