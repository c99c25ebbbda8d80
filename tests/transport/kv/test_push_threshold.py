"""The least length of prompts that are transferred during their prefill, by measured transfers."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.transport.kv.push_threshold import (
    MARGIN,
    MAX_TOKENS,
    MIN_TOKENS,
    TRIAL_INTERVAL,
    PushThreshold,
)
from tests.support.examples import num_examples


@settings(max_examples=num_examples(40, 400), deadline=None)
@given(
    st.floats(0.0, 0.01),
    st.floats(1e-6, 1e-4),
    st.floats(0.001, 0.05),
    st.floats(0.0, 0.9),
    st.integers(0, 2**32),
)
def test_the_threshold_is_where_transfers_after_the_prefill_begin_to_end_later(
    fixed: float, per_token: float, pushed_fixed: float, pushed_share: float, seed: int
) -> None:
    """Both ways take a + b n seconds; the threshold is at the crossing, within a doubling."""
    rng, threshold, now = Random(seed), PushThreshold(512), 0.0
    pushed_per_token = pushed_share * per_token
    for _ in range(12 * TRIAL_INTERVAL):
        now += 0.1
        num_tokens = rng.choice((64, 256, 1024, 4096))
        is_pushed = num_tokens >= threshold.next_threshold()
        seconds = (
            pushed_fixed + pushed_per_token * num_tokens
            if is_pushed
            else fixed + per_token * num_tokens
        )
        threshold.observe(num_tokens, is_pushed, seconds, now)
    gain = per_token - MARGIN * pushed_per_token
    crossing = (MARGIN * pushed_fixed - fixed) / gain if gain > 0 else MAX_TOKENS
    assert MIN_TOKENS <= threshold.num_tokens <= MAX_TOKENS
    if crossing <= MAX_TOKENS / 4:
        assert crossing / 2 <= threshold.num_tokens <= max(4 * crossing, MIN_TOKENS) or (
            crossing < MIN_TOKENS and threshold.num_tokens <= 2 * MIN_TOKENS
        )
    elif crossing > 4 * MAX_TOKENS:
        assert threshold.num_tokens == MAX_TOKENS


def test_the_initial_threshold_stays_until_both_ways_are_measured() -> None:
    threshold = PushThreshold(512)
    for number in range(50):
        threshold.observe(100, False, 0.1, number)
    assert threshold.num_tokens == 512
    threshold.observe(100, True, 0.0, 51.0)
    assert threshold.num_tokens == MIN_TOKENS


def test_both_ways_are_tried_now_and_then() -> None:
    threshold = PushThreshold(512)
    limits = [threshold.next_threshold() for _ in range(4 * TRIAL_INTERVAL)]
    assert limits.count(MIN_TOKENS) == limits.count(MAX_TOKENS) == 2
    assert set(limits) == {MIN_TOKENS, 512, MAX_TOKENS}
