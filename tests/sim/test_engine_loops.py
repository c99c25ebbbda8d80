"""Engines with event loops of their own: many events of one in a row, and the run of one heap."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from math import inf
from random import Random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gllm.observability.step_log import ScheduleEvent, StepLogEvent
from gllm.routing.policy_registry import make_policy
from gllm.sim.cluster.cluster import ClusterChange, ClusterRun, EngineFailure, simulate_cluster
from gllm.sim.cluster.engine import FinishTimeBounds
from gllm.sim.cluster.router import ROUTED_IN_A_ROW, PolicyRouter, RouterNeeds
from gllm.sim.deployment import Deployment, roofline_deployment
from gllm.sim.event_loop import EventLoop
from gllm.sim.metrics.run_recorder import RunRecorder
from gllm.sim.pipeline import SimulatedPipeline
from gllm.sim.workloads.requests import WorkloadRequest, make_workload
from tests.sim.test_cluster import clusters, failures
from tests.support.examples import num_examples
from tests.support.sim.cluster_parts import make_deployment
from tests.support.sim.requests import to_scheduler_requests

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
    num_in_a_row: int = ROUTED_IN_A_ROW,
) -> tuple[ClusterRun, bytes]:
    """Return a run, and all that it wrote and recorded.

    With one heap a router that reads numbers of requests reads them in the statistics.
    """
    router = PolicyRouter(make_policy(policy, Random(0)))
    router.num_routed_in_a_row = num_in_a_row
    assert not router.lets_wait
    router.lets_wait = is_one_heap
    if is_one_heap and router.needs.only_counts:
        router.needs = RouterNeeds(statistics=True)
    logs: dict[str, list[StepLogEvent]] = {}
    run = simulate_cluster(
        deployments, jobs, router, changes, lambda name: logs.setdefault(name, []).append
    )
    records = [
        (
            name,
            list(engine.record.micro_batches),
            engine.record.parallelism,
            engine.stats,
            engine.lives,
        )
        for name, engine in run.engines.items()
    ]
    results = logs, run.requests, run.unserved, records
    return run, msgspec.json.encode(results, enc_hook=vars)


SIZES = st.tuples(st.floats(0.0, 2.0), st.integers(1, 20), st.integers(1, 12))
"""Arrival in seconds, prompt tokens and output tokens of a request."""


@settings(max_examples=num_examples(40, 1000))
@given(st.lists(SIZES, min_size=1, max_size=8), st.integers(1, 3), st.sampled_from([0.03, 0.17]))
def test_no_request_ends_before_the_bound_of_its_engine(
    sizes: list[tuple[float, int, int]], num_stages: int, interval: float
) -> None:
    deployment = make_deployment(num_stages)
    recorder = RunRecorder(deployment.start_event(0.0))
    pipeline = SimulatedPipeline(deployment.scheduler, deployment.cost, [recorder])
    ends, bounds, now = FinishTimeBounds(deployment.cost, num_stages), [(inf, set[int]())], 0.0
    requests = to_scheduler_requests([WorkloadRequest(*size) for size in sorted(sizes)])
    pipeline.submit_each(requests)
    added = unfinished = {-1}
    while unfinished or len(added) <= len(requests):
        now += interval
        pipeline.loop.run(now)
        served = recorder.record.requests
        for time, request in requests:
            if request.seq in served.keys() - added:
                ends.add(request.seq, request.max_tokens, time)
        added = {-1, *served}
        unfinished = {seq for seq, each in served.items() if each.line.num_tokens < each.max_tokens}
        ends.update(pipeline, unfinished, now)
        bounds.append((ends.time, unfinished))
    assert ends.time == inf
    finish_times = {seq: each.line.times[-1] for seq, each in served.items()}
    for bound, unfinished in bounds:
        assert bound <= min((finish_times[seq] for seq in unfinished), default=inf)


@pytest.mark.parametrize("policy", ["round-robin", "least-requests", "power-of-two", "predict"])
@settings(
    max_examples=num_examples(15, 1500), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(data=st.data(), num_in_a_row=st.sampled_from([1, 2, 1024]))
def test_loops_of_engines_change_nothing(
    policy: str, data: st.DataObject, num_in_a_row: int
) -> None:
    deployments, jobs = data.draw(clusters())
    changes = data.draw(failures(list(deployments)))
    _, apart = simulate_engines(deployments, jobs, policy, changes, False, num_in_a_row)
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


def count_switches(
    engines: dict[str, Deployment], jobs: Iterable[WorkloadRequest], router: PolicyRouter
) -> tuple[int, int]:
    """Return the number of planned steps of all engines, and how often another engine has one."""
    planners: list[str] = []

    def open_log(name: str) -> Callable[[StepLogEvent], None]:
        def write(event: StepLogEvent) -> None:
            if isinstance(event, ScheduleEvent):
                planners.append(name)

        return write

    simulate_cluster(engines, jobs, router, open_log=open_log)
    return len(planners), sum(one != two for one, two in pairwise(planners))


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
def test_events_of_an_engine_happen_in_a_row(is_one_heap: bool) -> None:
    """An engine that goes on finds its data in the cache if no other one ran in between."""
    router = PolicyRouter(make_policy("round-robin", Random(0)))
    router.lets_wait = is_one_heap
    router.num_routed_in_a_row = NUM_ENGINES * NUM_REQUESTS // 2
    jobs = make_workload("fixed:16,16", NUM_ENGINES * NUM_REQUESTS, 8.0)
    engines = {f"engine-{index}": make_deployment(2) for index in range(NUM_ENGINES)}
    num_turns, num_switches = count_switches(engines, jobs, router)
    if is_one_heap:
        assert num_switches > num_turns / 4
    else:
        # Two halves of the requests, and what is under way after each of them.
        assert num_switches < 3 * NUM_ENGINES < num_turns / 50


@pytest.mark.parametrize(
    ("policy", "reads_counts"),
    [("least-requests", True), ("power-of-two", True), ("predict", False)],
)
def test_engines_wait_while_none_of_their_requests_can_end(policy: str, reads_counts: bool) -> None:
    """A policy that reads numbers of requests wakes one of eight engines per arrival."""
    engine = roofline_deployment("qwen2.5-32b", "L20", 4, 2048)
    engines = {f"engine-{index}": engine for index in range(8)}
    jobs = make_workload("uniform:100,400,4,16", 200, 35.0)
    router = PolicyRouter(make_policy(policy, Random(0)))
    _, num_switches = count_switches(engines, jobs, router)
    assert (num_switches < 1.5 * len(jobs)) == reads_counts
    assert num_switches > 0.5 * len(jobs)
