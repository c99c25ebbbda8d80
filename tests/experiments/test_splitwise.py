"""Splitwise's mixed pool in simulation: a cluster sized for code serves conversations (S12)."""

from collections.abc import Sequence
from random import Random

import pytest

from gllm.experiments.splitwise_clusters import MODEL, build_machine, reference_latencies
from gllm.kv_transfer.transfer_mode import TransferModePolicy
from gllm.routing.disaggregation.policy import PairRequest
from gllm.routing.disaggregation.role_pools import Pools
from gllm.routing.disaggregation.splitwise import SplitwisePairPolicy
from gllm.routing.state import EngineSnapshot
from gllm.sim.cluster.handoffs import OverlappedKvNetwork
from gllm.sim.cluster.paired import simulate_pairs
from gllm.sim.costs.splitwise import read_profile
from gllm.sim.hardware.links import NetworkLink
from gllm.sim.hardware.machines import read_machines
from gllm.sim.hardware.models import MODELS
from gllm.sim.metrics.slowdowns import check_slos, measure_latencies
from gllm.sim.workloads.requests import make_workload

NUM_REQUESTS = 150


class HomePoolsPolicy(SplitwisePairPolicy):
    """Splitwise's router without a mixed pool."""

    def _find_prefill(self, request: PairRequest, pools: Pools) -> EngineSnapshot | None:
        return self._least_pending(request, pools.prefill)

    def _find_decode(self, request: PairRequest, pools: Pools) -> EngineSnapshot | None:
        return self._least_reserved(pools.decode)


def are_slos_met(
    policy: SplitwisePairPolicy, num_prompt: int, num_token: int, rate: float, seed: int
) -> bool:
    """Return True if DGX-H100s serve conversations at a rate within all nine SLOs."""
    machine, shape = read_machines()["DGX-H100"], MODELS[MODEL]
    names: Sequence[str] = [f"machine-{index}" for index in range(num_prompt + num_token)]
    roles = {
        name: "prefill" if index < num_prompt else "decode" for index, name in enumerate(names)
    }
    jobs = make_workload("azure-conv", NUM_REQUESTS, rate, "poisson", seed)
    network = OverlappedKvNetwork(
        NetworkLink(machine.link.bandwidth, 0.0),
        shape.layers * shape.kv_bytes,
        shape.layers,
        read_profile(MODEL, machine.device).prompt_seconds,
        TransferModePolicy(),
    )
    engine = build_machine(machine, "splitwise")
    run = simulate_pairs(dict.fromkeys(names, engine), roles, jobs, policy, network)
    pairs = []
    for index, job in enumerate(jobs):
        latencies = measure_latencies(run.cluster.requests[index].line)
        assert latencies is not None
        reference = reference_latencies(job.num_prompt_tokens, job.num_output_tokens)
        pairs.append((latencies, reference))
    return all(margin.is_met for margin in check_slos(pairs))


@pytest.mark.parametrize(
    ("seed", "rate", "share"),
    [
        pytest.param(0, 35.75, 0.942, marks=pytest.mark.long),
        (1, 39.83, 0.95),
        pytest.param(2, 39.83, 0.95, marks=pytest.mark.long),
    ],
)
def test_a_cluster_sized_for_code_serves_conversations(
    seed: int, rate: float, share: float
) -> None:
    """Eight machines serve a share of a rate that is too high for every better split of them.

    So the mixed pool loses at most 5 % for two of three seeds, and 5.8 % for the other one, where
    the limit is the second slowest of 150 requests. Without it, half the rate is too high.
    """
    for num_token in (2, 3, 4):
        policy = SplitwisePairPolicy(Random(seed))
        assert not are_slos_met(policy, 8 - num_token, num_token, rate, seed)
    assert are_slos_met(SplitwisePairPolicy(Random(seed)), 7, 1, share * rate, seed)
    assert not are_slos_met(HomePoolsPolicy(Random(seed)), 7, 1, 0.45 * rate, seed)
