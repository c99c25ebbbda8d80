"""Chunks of one link over time: every policy sends all bytes, one chunk after another."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.weak_links_timeline import POLICIES, record_timeline
from gllm.pacing.traffic import TrafficClass
from gllm.sim.costs.base import TransferCost


@given(
    st.sampled_from(sorted(POLICIES)), st.floats(0.01, 0.5), st.floats(1.5, 9), st.integers(1, 9)
)
def test_a_link_sends_every_byte_once(
    name: str, prefill_seconds: float, gap: float, num_decodes: int
) -> None:
    rate, decode_seconds = 12.5e6, 0.002
    prefill, decode = (
        TransferCost(seconds, 0.03, round(seconds * rate))
        for seconds in (prefill_seconds, decode_seconds)
    )
    period = gap * decode_seconds
    timeline = record_timeline(POLICIES[name], prefill, decode, period, num_decodes)
    parts = timeline.intervals
    assert all(a.end <= b.start + 1e-6 for a, b in pairwise(parts))
    for kind, seconds in (
        (TrafficClass.PREFILL, prefill_seconds),
        (TrafficClass.DECODE, num_decodes * decode_seconds),
    ):
        busy = sum(part.end - part.start for part in parts if part.traffic_class is kind)
        assert busy == pytest.approx(seconds, rel=1e-3)
    assert len(timeline.waits) == num_decodes
    assert min(timeline.waits) > -1e-6
    assert timeline.prefill_end > prefill_seconds - 1e-6
