"""Engines with event loops of their own: many events of one in a row, and the run of one heap."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gllm.observability.step_log import StepLogEvent
from gllm.routing.policy_registry import make_policy
from gllm.sim.cluster import cluster
from gllm.sim.cluster.changes import ClusterChange, EngineFailure
from gllm.sim.cluster.cluster import ClusterRun, simulate_cluster
from gllm.sim.cluster.engine import ClusterEngine
from gllm.sim.cluster.router import PolicyRouter, RouterNeeds
from gllm.sim.deployment import Deployment, roofline_deployment
from gllm.sim.event_loop import EventLoop
from gllm.sim.pipeline import SimulatedPipeline
from gllm.sim.workloads.requests import WorkloadRequest, make_workload
from tests.sim.test_cluster_changes import clusters, failures
from tests.support.examples import num_examples
from tests.support.sim.cluster_parts import make_deployment

NUM_ENGINES, NUM_REQUESTS = 4, 40


# The loop by itself.

Step = tuple[float, int]
"""Time until the next event, and its rank."""
steps = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(2, 4)), max_size=6)


def run_chains(
    loops: list[EventLoop], chains: list[list[Step]], until: float
) -> dict[int, list[str]]:
    """Run chains of events, each in a loop, and arrivals in the first; return what each chain saw.

    An arrival starts an event in each other loop. The first chain sees the events of all.
    """
    seen: dict[int, list[str]] = {chain: [] for chain in range(len(chains))}

    def happen(now: float, place: tuple[int, int]) -> None:
        chain, position = place
        word = f"{chain}.{position} {now:g}"
        seen[chain].append(word)
        if not chain:
            seen[0].append(f"after {[len(words) for words in seen.values()][1:]}")
        if position < len(chains[chain]):
            delay, rank = chains[chain][position]
            loops[chain].push(now + delay, rank, happen, (chain, position + 1))

    def arrive(now: float, number: int) -> None:
        for chain in range(1, len(chains)):
            loops[chain].push(now, 1, happen, (chain, 99 + number))

    for chain in range(len(chains)):
        loops[chain].push(0.0, 2, happen, (chain, 0))
    arrivals = [(0.5 * number, number) for number in range(8)]
    loops[0].push_each(arrivals, 1, arrive, 1 if loops[0] is loops[1] else 3)
    assert loops[0].run(until) <= until
    return seen


@given(st.lists(steps, min_size=2, max_size=4), st.sampled_from([1.0, 1.2, 100.0]))
def test_children_and_one_heap_have_the_same_order(chains: list[list[Step]], until: float) -> None:
    heap, parent = EventLoop(), EventLoop()
    children = [parent.make_child() for _ in chains[1:]]
    one_heap = run_chains([heap] * len(chains), chains, until)
    assert run_chains([parent, *children], chains, until) == one_heap
    assert parent.run() == heap.run()


def test_children_of_one_loop_run_in_turns_of_many_events() -> None:
    parent = EventLoop()
    said: list[str] = []

    def say(now: float, word: str) -> None:
        said.append(f"{word}{now:g}")

    for name in "ab":
        child = parent.make_child()
        child.push_each([(time, name) for time in (1.0, 2.0, 4.0)], 0, say)
    parent.push(3.0, 0, say, "-")
    assert parent.run() == 4.0
    assert said == ["a1", "a2", "b1", "b2", "-3", "a4", "b4"]


# Engines.


def simulate_engines(
    deployments: dict[str, Deployment],
    jobs: Iterable[WorkloadRequest],
    policy: str,
    changes: list[ClusterChange],
    is_one_heap: bool,
) -> tuple[ClusterRun, bytes]:
    """Return a run, and all that it wrote and recorded.

    With one heap a router that reads numbers of requests reads them in the statistics.
    """
    router = PolicyRouter(make_policy(policy, Random(0)))
    assert not router.lets_wait
    router.lets_wait = is_one_heap
    if is_one_heap and router.needs.only_counts:
        router.needs = RouterNeeds(statistics=True)
    logs: dict[str, list[StepLogEvent]] = {}
    run = simulate_cluster(
        deployments, jobs, router, changes, lambda name: logs.setdefault(name, []).append
    )
    records = [
        (name, list(each.record.micro_batches), each.record.parallelism, each.stats, each.lives)
        for name, each in run.engines.items()
    ]
    results = logs, run.requests, run.unserved, records
    return run, msgspec.json.encode(results, enc_hook=vars)


def check_bounds(patch: pytest.MonkeyPatch) -> None:
    """Assert from now on that no request ends before the time that its engine has for it."""
    on_finished = ClusterEngine.on_finished

    def checked(engine: ClusterEngine, seqs: list[int], now: float) -> None:
        bounds = {seq: bound for bound, seq in engine._ends._heap}
        assert all(bounds.get(seq, 0.0) <= now for seq in seqs)
        on_finished(engine, seqs, now)

    patch.setattr(ClusterEngine, "on_finished", checked)


@pytest.mark.parametrize("policy", ["round-robin", "least-requests", "power-of-two", "predict"])
@settings(
    max_examples=num_examples(40, 1500), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(data=st.data(), num_in_a_row=st.sampled_from([1, 2, 1024]))
def test_loops_of_engines_change_nothing(
    policy: str, data: st.DataObject, num_in_a_row: int
) -> None:
    deployments, jobs = data.draw(clusters())
    changes = data.draw(failures(list(deployments)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "ROUTED_IN_A_ROW", num_in_a_row)
        check_bounds(patch)
        _, apart = simulate_engines(deployments, jobs, policy, changes, False)
    _, together = simulate_engines(deployments, jobs, policy, changes, True)
    assert apart == together


def test_a_request_waits_for_the_engine_that_holds_it_while_another_one_works() -> None:
    large = make_deployment()
    small = replace(large, scheduler=replace(large.scheduler, max_model_len=32))
    engines = {"small": small, "large": large}
    jobs = [WorkloadRequest(0.1 * (index // 2), 8 + 24 * (index == 5), 8) for index in range(40)]
    failure = EngineFailure("large", 0.0, restart_seconds=1.0)
    run, apart = simulate_engines(engines, jobs, "round-robin", [failure], False)
    assert not run.unserved
    assert run.requests[5].line.times[0] > 1.0 > run.requests[6].line.times[0]
    assert simulate_engines(engines, jobs, "round-robin", [failure], True)[1] == apart


def record_turns(monkeypatch: pytest.MonkeyPatch) -> list[SimulatedPipeline]:
    """Return the list that gets the pipeline of each turn of a driver."""
    turns: list[SimulatedPipeline] = []
    take_turn = SimulatedPipeline._take_turn

    def count_turn(self: SimulatedPipeline, *arguments: Any) -> None:
        turns.append(self)
        take_turn(self, *arguments)

    monkeypatch.setattr(SimulatedPipeline, "_take_turn", count_turn)
    return turns


@pytest.mark.parametrize("policy", ["least-requests", "least-tokens", "predict"])
def test_requests_of_a_dead_engine_are_routed_by_loads_with_each_other(policy: str) -> None:
    engines = {name: make_deployment(2) for name in "abcd"}
    jobs = [WorkloadRequest(0.001 * index, 8 + index % 5, 20) for index in range(40)]
    failure = EngineFailure("a", 0.5)
    run, apart = simulate_engines(engines, jobs, policy, [failure], False)
    moved = [served for served in run.requests.values() if served.num_resumptions]
    assert len(moved) > 5
    assert simulate_engines(engines, jobs, policy, [failure], True)[1] == apart


@pytest.mark.parametrize("is_one_heap", [False, True])
def test_events_of_an_engine_happen_in_a_row(
    is_one_heap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that goes on finds its data in the cache if no other one ran in between."""
    turns = record_turns(monkeypatch)
    monkeypatch.setattr(cluster, "ROUTED_IN_A_ROW", NUM_ENGINES * NUM_REQUESTS // 2)
    jobs = make_workload("fixed:16,16", NUM_ENGINES * NUM_REQUESTS, 8.0)
    engines = {f"engine-{index}": make_deployment(2) for index in range(NUM_ENGINES)}
    simulate_engines(engines, jobs, "round-robin", [], is_one_heap)
    num_switches = sum(one is not two for one, two in pairwise(turns))
    if is_one_heap:
        assert num_switches > len(turns) / 4
    else:
        # Two halves of the requests, and what is under way after each of them.
        assert num_switches < 3 * NUM_ENGINES < len(turns) / 50


@pytest.mark.parametrize(
    ("policy", "reads_counts"),
    [("least-requests", True), ("power-of-two", True), ("predict", False)],
)
def test_engines_wait_while_none_of_their_requests_can_end(
    policy: str, reads_counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that reads numbers of requests wakes one of eight engines per arrival."""
    turns = record_turns(monkeypatch)
    engine = roofline_deployment("qwen2.5-32b", "L20", 4, 2048)
    engines = {f"engine-{index}": engine for index in range(8)}
    jobs = make_workload("uniform:100,400,4,16", 400, 35.0)
    simulate_cluster(engines, jobs, PolicyRouter(make_policy(policy, Random(0))))
    num_switches = sum(one is not two for one, two in pairwise(turns))
    assert (num_switches < 1.5 * len(jobs)) == reads_counts
    assert num_switches > 0.5 * len(jobs)
