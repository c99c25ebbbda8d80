"""Requests that have not started move between simulated engines."""

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest

from experiments.rebalanced_cluster import (
    RebalancedRun,
    find_unstarted,
    simulate_rebalanced,
    withdraw,
)
from gllm.routing.placement import LatencyModel, PlacementRules
from gllm.routing.policies.aladdin import AladdinPolicy
from gllm.scheduler.output_lengths import PromptLengthPredictor
from gllm.sim.cluster.cluster import SimulatedCluster
from gllm.sim.cluster.router import PolicyRouter
from gllm.sim.workloads.requests import WorkloadRequest
from tests.support.sim.cluster_parts import FirstEngineRouter, make_deployment

MODEL = LatencyModel(k1=0.003, c1=0.0, k2=1e-6, c2=1e-3, c3=0.05)
PREDICTED = 16
"""Output tokens that are predicted of each request."""


def jobs_of(seed: int) -> list[WorkloadRequest]:
    """Return requests of 1 to 30 output tokens, of which engines begin one per step of 50 ms."""
    rng = Random(seed)
    return [WorkloadRequest(0.08 * index, 12, rng.randint(1, 30)) for index in range(250)]


def rebalanced(jobs: Sequence[WorkloadRequest]) -> RebalancedRun:
    rules = PlacementRules(constraints=frozenset("e"))
    policy = AladdinPolicy(Random(0), rules, MODEL)
    lengths = PromptLengthPredictor()
    for _ in range(50):
        lengths.record(12, PREDICTED)
    engines = {name: make_deployment() for name in "abc"}
    router = PolicyRouter(policy, rules.slo, lengths)
    return simulate_rebalanced(engines, jobs, router, rules, MODEL)


def test_a_moved_request_is_served_once_by_its_last_engine() -> None:
    jobs = jobs_of(0)
    run = rebalanced(jobs)
    assert len(run.moves) >= 5
    assert run.num_chances >= 50
    assert len(run.cluster.requests) == len(jobs)
    for index, job in enumerate(jobs):
        served = run.cluster.requests[index]
        assert served.line.num_tokens == job.num_output_tokens
        assert served.line.arrival == pytest.approx(job.arrival_seconds)
        moves = [each for each in run.moves if each.request_index == index]
        assert served.num_resumptions == len(moves)
        assert all(a.target == b.source for a, b in pairwise(moves))
    # All tokens of each engine are those of requests that have not left it.
    for name, engine in run.cluster.engines.items():
        left = {move.seq for move in run.moves if move.source == name}
        assert left <= engine.record.requests.keys()
        for seq, part in engine.record.requests.items():
            assert part.line.num_tokens == (0 if seq in left else part.max_tokens)


def test_no_request_moves_after_its_start_and_each_move_lowers_the_error() -> None:
    runs = [rebalanced(jobs_of(seed)) for seed in range(4)]
    assert sum(len(run.moves) for run in runs) >= 20
    for run in runs:
        assert run.num_started_moves == 0
        assert all(move.lowers_distances for move in run.moves)
        # Nothing but what has moved is unscheduled where it is recorded.
        scheduled = [
            served.first_scheduled_time
            for engine in run.cluster.engines.values()
            for served in engine.record.requests.values()
        ]
        assert scheduled.count(None) == len(run.moves)


def test_exact_predictions_move_nothing() -> None:
    jobs = [WorkloadRequest(0.02 * index, 12, PREDICTED) for index in range(100)]
    run = rebalanced(jobs)
    assert run.num_chances
    assert not run.moves


def test_an_engine_gives_back_only_what_it_has_not_begun() -> None:
    cluster = SimulatedCluster(FirstEngineRouter())
    cluster.add_engine("a", make_deployment())
    engine = cluster.engines["a"]
    cluster.submit_each([WorkloadRequest(time, 12, 5) for time in (0.0, 0.0, 0.02)])
    cluster.loop.run(0.01)
    # A step has 16 tokens: the first prompt and a part of the second.
    assert not find_unstarted(engine)
    with pytest.raises(ValueError, match="unstarted"):
        withdraw(engine, 1, cluster.loop.now)
    cluster.loop.run(0.02)
    assert find_unstarted(engine) == [2]
    assert withdraw(engine, 2, cluster.loop.now).index == 2
    assert not find_unstarted(engine)
    assert {index: each.line.num_tokens for index, each in cluster.run().requests.items()} == {
        0: 5, 1: 5, 2: 0,
    }  # fmt: skip
