"""What the timeline of a request says about its latency."""

import pytest

from gllm.observability.latency import RequestTimeline, percentile


def test_latencies_of_a_timeline() -> None:
    line = RequestTimeline(10.0)
    assert (line.ttft, line.e2el, line.tpot) == (None, None, None)
    line.record_output(12.0)
    assert (line.ttft, line.e2el, line.tpot) == (2.0, 2.0, None)
    line.record_output(13.0)
    line.record_output(15.0, 2)
    assert line.e2el == 5.0
    assert line.tpot == pytest.approx(1.0)


def test_percentiles_interpolate() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0], 99) == 1.0
    assert percentile([1.0, 2.0], 100) == 2.0
