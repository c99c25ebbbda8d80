"""Simulated hand-offs whose transfers overlap with the prefill."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.overlapped_transfers import OverlappedKvNetwork, TransferCosts
from experiments.transfer_mode import TransferMode, TransferModePolicy
from gllm.routing.disaggregation.policy_registry import make_pair_policy
from gllm.sim.cluster.handoffs import HandoffRecord, KvNetwork
from gllm.sim.cluster.paired import simulate_pairs
from gllm.sim.hardware.devices import NetworkLink
from gllm.sim.workloads.requests import WorkloadRequest
from tests.sim.test_paired import BYTES_PER_TOKEN, LATENCY, PROMPT, STEP, make_engine

LAYERS = 4
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


def serve(network: KvNetwork) -> HandoffRecord:
    run = simulate_pairs(
        {"P0": make_engine(), "D0": make_engine()},
        {"P0": "prefill", "D0": "decode"},
        [WorkloadRequest(0.0, PROMPT, 4)],
        make_pair_policy("splitwise", Random(0)),
        network,
    )
    assert run.cluster.requests[0].line.num_tokens == 4
    return run.handoffs[0]


def visible_seconds(threshold: int | None, layer_transfer_seconds: float) -> float:
    """Return the time from token 1 to the arrival of the KV cache."""
    bandwidth = PROMPT * BYTES_PER_TOKEN / LAYERS / layer_transfer_seconds
    network = OverlappedKvNetwork(
        NetworkLink(bandwidth, LATENCY),
        BYTES_PER_TOKEN,
        LAYERS,
        lambda num_tokens: STEP,
        TransferModePolicy(threshold),
    )
    record = serve(network)
    assert record.is_ok
    assert record.arrival_time is not None
    return record.arrival_time - record.ready_time - LATENCY


@pytest.mark.parametrize("layer", [STEP / 100, STEP / LAYERS / 2])
def test_only_the_last_layer_is_visible_if_layers_take_longer_to_compute(layer: float) -> None:
    assert visible_seconds(PROMPT, layer) <= 1.5 * layer
    assert visible_seconds(PROMPT + 1, layer) == pytest.approx(LAYERS * layer, rel=0.1)
    assert visible_seconds(None, layer) == pytest.approx(LAYERS * layer, rel=0.1)


def test_slow_links_hide_the_computation_of_all_layers_but_one() -> None:
    layer = STEP
    expected = LAYERS * layer - (LAYERS - 1) * STEP / LAYERS
    assert visible_seconds(PROMPT, layer) == pytest.approx(expected, rel=0.1)


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
    visible = costs.visible_seconds(TransferMode.PER_LAYER, num_tokens)
    assert visible == pytest.approx(expected, rel=1e-6, abs=1e-9 * free)


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
