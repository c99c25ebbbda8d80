"""Routing policies in simulated clusters: their view of the engines, and their predictions."""

from collections.abc import Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from random import Random
from statistics import fmean

import pytest

from benchmarks.routing import simulate, simulated_capacity, simulated_pool
from gllm.options.slo import Slo
from gllm.routing.policies.aladdin import AladdinPolicy
from gllm.routing.policies.predict import Prediction, predict_all
from gllm.routing.policy import RoutingPolicy
from gllm.routing.policy_registry import make_policy
from gllm.routing.state import EngineSnapshot, RoutingRequest
from gllm.sim.cluster.cluster import SimulatedCluster, simulate_cluster
from gllm.sim.cluster.router import PolicyRouter
from gllm.sim.deployment import Deployment, roofline_deployment
from gllm.sim.options import SimulationConfig
from gllm.sim.workloads.classes import assign_classes
from gllm.sim.workloads.requests import make_workload

REQUESTS = 120


def test_router_knows_cached_blocks_and_fitted_costs_of_an_engine() -> None:
    policy = make_policy("predict", Random(0))
    cluster = SimulatedCluster(PolicyRouter(policy))
    cluster.add_engine("e1", simulated_pool("unequal")["e1"])
    engine = cluster.engines["e1"]
    assert engine.snapshot(0.0).coefficients is None
    jobs = make_workload("sessions:4,3,1,64,20,40", 12, 1.0)
    cluster.submit_each(jobs)
    (run,) = cluster.run().engines.values()
    engine.update_index(policy.prefixes)
    # The prompts and the computed output tokens, without what the conversations share.
    num_tokens = sum(job.num_prompt_tokens + job.num_output_tokens - 1 for job in jobs)
    num_blocks = (num_tokens - run.stats.prefix_hits) // engine.config.block_size
    assert num_blocks - len(jobs) <= policy.prefixes.num_blocks["e1"] <= num_blocks
    coefficients = engine.snapshot(0.0).coefficients
    assert coefficients is not None
    # Each step takes 40 ms, whatever is in it.
    tokens = run.stats.prefill_tokens + run.stats.decode_tokens
    predicted = coefficients.step + coefficients.token * tokens / run.stats.steps
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
    uses_step_costs = True

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
    ("deployments", "workload", "rate", "error"),
    [
        (simulated_pool("unequal"), "sessions", 9.0, 0.3),
        *(
            pytest.param({"a": engine}, "azure-conv", rate, error, marks=pytest.mark.full)
            for engine, rate, error in (
                (roofline_deployment("qwen2.5-32b", "L20", 4, 16_384), 3.0, 0.1),
                (roofline_deployment("qwen2.5-14b", "L20", 2, 16_384), 1.5, 0.1),
                # Prompts queue: the engine chooses other chunks than for a lone one.
                (roofline_deployment("qwen2.5-14b", "L20", 2, 16_384), 3.5, 0.05),
            )
        ),
    ],
    ids=["unequal", "four stages", "two stages", "two stages, queue"],
)
def test_predictions_come_true(
    deployments: dict[str, Deployment], workload: str, rate: float, error: float
) -> None:
    """The mean of the predicted latencies is close, and late requests are predicted to be late.

    `error` is that of the later half of the requests.
    """
    recorder = Recorder()
    jobs = make_workload(workload, 160, rate, seed=1)
    run = simulate_cluster(deployments, jobs, PolicyRouter(recorder))
    lines = {index: request.line for index, request in run.requests.items()}
    # Cost models and statistics need some steps first.
    pairs = [
        (prediction, lines[seq]) for seq, prediction in enumerate(recorder.predictions) if seq >= 40
    ]
    pairs.sort(key=lambda pair: pair[1].ttft or 0.0)
    half = len(pairs) // 2
    for part, limit in ((pairs, 0.3), (pairs[:half], 0.3), (pairs[half:], error)):
        predicted = fmean(prediction.ttft_seconds for prediction, _ in part)
        assert predicted == pytest.approx(fmean(line.ttft or 0.0 for _, line in part), rel=limit)
    tpot = [(each.tpot_seconds, line.tpot) for each, line in pairs if line.tpot is not None]
    predicted = fmean(predicted for predicted, _ in tpot)
    assert predicted == pytest.approx(fmean(actual for _, actual in tpot), rel=0.4)


class OrderRecorder(AladdinPolicy):
    """Aladdin's policy, which keeps the requests in the order of their placement."""

    def __init__(self) -> None:
        super().__init__(Random(0))
        self.placed: list[tuple[float, RoutingRequest]] = []

    def choose(self, request: RoutingRequest, engines: Sequence[EngineSnapshot]) -> str | None:
        """Return the choice of the policy."""
        if engines:
            self.placed.append((engines[0].time, request))
        return super().choose(request, engines)


def test_a_heartbeat_is_placed_together_longest_prompts_first() -> None:
    heartbeat, recorder = 0.5, OrderRecorder()
    jobs = make_workload("uniform:8,200,2,30", 60, 20.0)
    router = PolicyRouter(recorder, heartbeat_seconds=heartbeat)
    run = simulate_cluster(simulated_pool("equal"), jobs, router)
    assert sorted(run.requests) == list(range(60))
    batches = [
        [request.num_prompt_tokens for _, request in batch]
        for _, batch in groupby(recorder.placed, key=itemgetter(0))
    ]
    assert all(batch == sorted(batch, reverse=True) for batch in batches)
    assert fmean(map(len, batches)) > 5
    times = sorted({time for time, _ in recorder.placed})
    assert all(later - earlier >= heartbeat - 1e-6 for earlier, later in pairwise(times))
    with pytest.raises(ValueError, match="set routing_policy to aladdin"):
        SimulationConfig(routing_policy="random", placement_heartbeat=heartbeat)


def test_requests_of_a_cluster_have_the_limits_of_their_class() -> None:
    recorder = OrderRecorder()
    limits = {"chat": Slo(0.5, 0.1), "batch": Slo(20.0)}
    jobs = assign_classes(
        make_workload("uniform:8,200,2,30", 60, 20.0), None, {"chat": 1.0, "batch": 1.0, "": 1.0}
    )
    simulate_cluster(simulated_pool("equal"), jobs, PolicyRouter(recorder, limits))
    assert [request.slo for _, request in recorder.placed] == [
        limits.get(job.slo_class) for job in jobs
    ]
    assert len({job.slo_class for job in jobs}) == 3
