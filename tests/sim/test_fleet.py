"""Simulated fleets: the router's view of its engines, and what policies make of it."""

from collections.abc import Sequence
from random import Random
from statistics import fmean

import pytest

from benchmarks.routing import simulate, simulated_capacity, simulated_pool
from gllm.routing.policy import RoutingPolicy
from gllm.routing.policy_registry import POLICIES, make_policy
from gllm.routing.predict import Prediction, predict_all
from gllm.routing.prefix_index import PrefixIndex
from gllm.routing.state import EngineSnapshot, RoutingRequest
from gllm.sim.deployment import Deployment, roofline_deployment
from gllm.sim.event_loop import EventLoop
from gllm.sim.fleet import SimulatedEngine, simulate_fleet
from gllm.sim.workloads.requests import make_workload, to_scheduler_requests

REQUESTS = 120


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_served_once(policy: str) -> None:
    jobs = make_workload("uniform:8,200,2,30", 60, 20.0)
    runs = simulate_fleet(simulated_pool("equal"), jobs, make_policy(policy, Random(0)))
    served = [seq for run in runs.values() for seq in run.record.requests]
    assert sorted(served) == list(range(60))
    for run in runs.values():
        for seq, request in run.record.requests.items():
            assert request.line.num_tokens == jobs[seq].num_output_tokens
    assert all(run.record.requests for run in runs.values())


def test_router_knows_cached_blocks_and_fitted_costs_of_an_engine() -> None:
    engine = SimulatedEngine("e0", simulated_pool("unequal")["e1"], EventLoop())
    assert engine.snapshot().coefficients is None
    index = PrefixIndex()
    engine.update_index(index)
    jobs = make_workload("sessions:4,3,1,64,20,40", 12, 1.0)
    requests = to_scheduler_requests(jobs)
    engine.pipeline.submit_each(requests)
    engine.pipeline.loop.run()
    engine.update_index(index)
    pool = engine.pipeline.scheduler.kv_cache.block_pool
    assert index.num_blocks["e0"] == len(list(pool.digests)) > 12
    coefficients = engine.snapshot().coefficients
    assert coefficients is not None
    # Each step takes 40 ms, whatever is in it.
    stats = engine.snapshot().stats
    tokens = stats.prefill_tokens + stats.decode_tokens
    predicted = coefficients.step + coefficients.token * tokens / stats.steps
    assert predicted == pytest.approx(0.04, rel=0.15)


def test_predictions_beat_counts_where_engines_differ() -> None:
    rate = 0.7 * simulated_capacity("unequal", REQUESTS, 5)
    ttft = {
        policy: simulate("unequal", policy, rate, REQUESTS, 5).ttft_mean
        for policy in ("predict", "least-requests", "round-robin")
    }
    assert ttft["predict"] < 0.9 * ttft["least-requests"] < 0.9 * ttft["round-robin"]


def test_prefixes_are_found_where_they_were_computed() -> None:
    rate = 0.7 * simulated_capacity("equal", REQUESTS, 6)
    hits = {
        policy: simulate("equal", policy, rate, REQUESTS, 6).hit_share
        for policy in ("prefix-aware", "predict", "session", "round-robin")
    }
    assert min(hits["prefix-aware"], hits["predict"], hits["session"]) > 1.1 * hits["round-robin"]


class Recorder(RoutingPolicy):
    """A policy that keeps the predictions for the engines that another one chooses."""

    uses_prefixes = True

    def __init__(self) -> None:
        super().__init__(Random(0))
        self.predictions: list[Prediction] = []
        self._policy = make_policy("predict", Random(0))
        self._policy.prefixes = self.prefixes

    def choose(self, request: RoutingRequest, engines: Sequence[EngineSnapshot]) -> str | None:
        """Return the choice of the other policy."""
        chosen = self._policy.choose(request, engines)
        assert chosen is not None
        self.predictions.append(predict_all(request, engines, self.prefixes)[chosen])
        return chosen


@pytest.mark.parametrize(
    ("deployments", "workload", "rate"),
    [
        (simulated_pool("unequal"), "sessions", 9.0),
        ({"a": roofline_deployment("qwen2.5-32b", "L20", 4, 16_384)}, "azure-conv", 3.0),
        ({"a": roofline_deployment("qwen2.5-14b", "L20", 2, 16_384)}, "azure-conv", 1.5),
    ],
    ids=["unequal", "four stages", "two stages"],
)
def test_predictions_come_true(
    deployments: dict[str, Deployment], workload: str, rate: float
) -> None:
    """The mean of the predicted latencies is close, and late requests are predicted to be late."""
    recorder = Recorder()
    jobs = make_workload(workload, 160, rate, seed=1)
    runs = simulate_fleet(deployments, jobs, recorder)
    lines = {
        seq: request.line for run in runs.values() for seq, request in run.record.requests.items()
    }
    # Cost models and statistics need some steps first.
    pairs = [
        (prediction, lines[seq]) for seq, prediction in enumerate(recorder.predictions) if seq >= 40
    ]
    pairs.sort(key=lambda pair: pair[1].ttft or 0.0)
    for part in (pairs, pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]):
        predicted = fmean(prediction.ttft_seconds for prediction, _ in part)
        assert predicted == pytest.approx(fmean(line.ttft or 0.0 for _, line in part), rel=0.3)
    tpot = [(each.tpot_seconds, line.tpot) for each, line in pairs if line.tpot is not None]
    predicted = fmean(predicted for predicted, _ in tpot)
    assert predicted == pytest.approx(fmean(actual for _, actual in tpot), rel=0.4)
