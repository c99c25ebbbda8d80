"""Mode of a transfer: threshold, visible times, and the bounds between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.scheduler.transfer_mode import (
    DEFAULT_THRESHOLD_TOKENS,
    TransferCosts,
    TransferMode,
    TransferModePolicy,
    calibrate_threshold,
)

SERIALIZED, PER_LAYER = TransferMode.SERIALIZED, TransferMode.PER_LAYER

SECONDS = st.integers(0, 1000).map(lambda count: 1e-6 * count)
COSTS = st.builds(
    TransferCosts,
    num_layers=st.integers(1, 96),
    bytes_per_token=st.floats(1e3, 1e7),
    bytes_per_second=st.floats(1e7, 1e12),
    prefill_tokens_per_second=st.floats(10, 1e5),
    fixed_seconds=SECONDS,
    layer_seconds=SECONDS,
    interference_seconds=SECONDS,
)


@given(threshold=st.integers(1, 10**6))
def test_the_threshold_is_the_first_prompt_per_layer(threshold: int) -> None:
    policy = TransferModePolicy(threshold)
    assert policy.choose(threshold - 1) is SERIALIZED
    assert policy.choose(threshold) is PER_LAYER


def test_the_default_is_the_papers_and_none_is_never() -> None:
    assert DEFAULT_THRESHOLD_TOKENS == 512
    assert TransferModePolicy().choose(511) is SERIALIZED
    assert TransferModePolicy().choose(512) is PER_LAYER
    assert TransferModePolicy(None).choose(10**9) is SERIALIZED
    assert TransferModePolicy(0).choose(0) is PER_LAYER


@given(costs=COSTS)
def test_calibrated_threshold_is_where_per_layer_begins_to_be_faster(costs: TransferCosts) -> None:
    threshold = calibrate_threshold(costs)

    def gain(num_tokens: int) -> float:
        added = (costs.added_seconds(mode, num_tokens) for mode in (SERIALIZED, PER_LAYER))
        serialized, per_layer = added
        return serialized - per_layer

    if threshold is None:
        assert costs.num_layers == 1
        assert all(gain(1 << bits) <= 1e-12 * (1 << bits) for bits in range(20))
        return
    assert gain(threshold) > 0
    if threshold > 1:
        assert gain(threshold - 1) <= 0
    if costs.num_layers > 1:
        # It stays faster for all longer prompts, and slower for all shorter ones.
        assert all(gain(threshold + step) > 0 for step in (1, 10, 1000, 10**6))
        assert all(gain(threshold * part // 8) <= 0 for part in range(1, 8) if threshold > 8)


@given(costs=COSTS, num_tokens=st.integers(1, 10**5))
def test_visible_time_is_that_of_a_link_that_sends_layers_in_order(
    costs: TransferCosts, num_tokens: int
) -> None:
    """The formula equals a link that sends each layer once it is computed."""
    transfer = costs.layer_transfer_seconds(num_tokens)
    compute = costs.layer_compute_seconds(num_tokens)
    free = 0.0
    for layer in range(costs.num_layers):
        free = max(free, (layer + 1) * compute) + transfer
    expected = free - costs.num_layers * compute
    visible = costs.visible_seconds(PER_LAYER, num_tokens)
    assert visible == pytest.approx(expected, rel=1e-6, abs=1e-9 * free)


def test_free_layers_are_always_sent_one_by_one() -> None:
    assert calibrate_threshold(TransferCosts(40, 8e5, 25e9, 1e4)) == 1


def test_threshold_by_hand() -> None:
    """10 layers, 100 tokens/s, 1 ms interference each: 10 ms < 0.9 n 1 ms from n = 12 on."""
    costs = TransferCosts(10, 1e3, 1e6, 100, interference_seconds=1e-3)
    assert calibrate_threshold(costs) == 12


@pytest.mark.parametrize(
    ("field", "value"), [("num_layers", 0), ("bytes_per_second", -1.0), ("layer_seconds", -1.0)]
)
def test_impossible_costs_are_refused(field: str, value: float) -> None:
    values = {
        "num_layers": 4,
        "bytes_per_token": 1.0,
        "bytes_per_second": 1.0,
        "prefill_tokens_per_second": 1.0,
    }
    with pytest.raises(ValueError, match=field):
        TransferCosts(**(values | {field: value}))  # type: ignore[arg-type]


def test_negative_thresholds_are_refused() -> None:
    with pytest.raises(ValueError, match="threshold_tokens is -1"):
        TransferModePolicy(-1)
