"""Simulated hand-offs whose transfers overlap with the prefill."""

from random import Random

import pytest

from gllm.routing.disaggregation.policy_registry import make_pair_policy
from gllm.scheduler.transfer_mode import TransferModePolicy
from gllm.sim.cluster.handoffs import HandoffRecord, KvNetwork, OverlappedKvNetwork
from gllm.sim.cluster.paired import simulate_pairs
from gllm.sim.hardware.links import NetworkLink
from gllm.sim.workloads.requests import WorkloadRequest
from tests.sim.test_paired import BYTES_PER_TOKEN, LATENCY, PROMPT, STEP, make_engine

LAYERS = 4


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
