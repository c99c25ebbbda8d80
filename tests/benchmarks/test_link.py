"""The benchmark of the data movers moves real steps, and its table has a value for each kind."""

import pytest

from benchmarks.link import LinkRound, make_rows, measure_copies, measure_links, measure_loopback

pytestmark = pytest.mark.full


def test_rows_are_medians_by_kind() -> None:
    rounds = [LinkRound(rate * 1e9, rate, 2.0, [1e-4, 3e-4, 2e-4]) for rate in (1.0, 3.0, 2.0)]
    rows = make_rows({"plain": rounds, "TLS": rounds[:1]})
    assert rows[0] == ["large steps (GB/s)", "2.00", "1.00"]
    assert rows[1][1:] == ["2.00", "1.00"]
    assert rows[3] == ["round trip of 3.5 KB, median (us)", "200", "200"]


@pytest.mark.long
@pytest.mark.parametrize("has_tls", [False, True])
async def test_steps_are_moved(has_tls: bool) -> None:
    figures = await measure_links(has_tls, 4, 5)
    assert figures.bytes_per_second > 0
    assert len(figures.round_trips) == 5


@pytest.mark.long
def test_limits_are_measured() -> None:
    assert measure_copies(10**8) > 0
    assert measure_loopback(10**8) > 0
