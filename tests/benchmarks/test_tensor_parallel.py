"""Figures of the comparison of threads, ranks and stages from hand-made times."""

import pytest

from benchmarks.cpu.tensor_parallel import (
    PREFILL,
    STREAMS,
    VARIANTS,
    StreamTimes,
    decode_cell,
    decode_rate,
    format_page,
    ratios,
)

pytestmark = pytest.mark.full

CELLS = [*map(decode_cell, STREAMS), PREFILL]
REFERENCE, RANKS, STAGES = VARIANTS


def rounds() -> list[dict[str, dict[str, float]]]:
    """The machine is twice as fast in the second round."""
    speeds = {REFERENCE: 100.0, RANKS: 90.0, STAGES: 50.0}
    return [
        {name: dict.fromkeys(CELLS, factor * speed) for name, speed in speeds.items()}
        for factor in (1.0, 2.0)
    ]


def test_the_first_token_is_not_a_decode() -> None:
    streams = [StreamTimes(0.0, 5.0, 6.0, 11), StreamTimes(0.0, 5.5, 7.5, 11)]
    assert decode_rate(streams) == pytest.approx(10 + 5)


def test_ratios_are_within_a_round() -> None:
    assert ratios(rounds(), RANKS, PREFILL) == pytest.approx([0.9, 0.9])


def test_the_page_has_every_variant() -> None:
    page = format_page(rounds(), foreign=0.01)
    assert page.count(RANKS) == page.count(STAGES) == 2
    assert page.count(REFERENCE) == 1
    assert "0.900 (0.900 to 0.900)" in page
    assert "75.0" in page, "the median of both rounds"
