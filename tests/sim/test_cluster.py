"""Simulated clusters: each request is served once, also where engines fail, drain or start."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.routing import simulated_pool
from gllm.observability.latency import RequestTimeline
from gllm.observability.step_log import StepLogEvent
from gllm.routing.policies.deferred import SPARE_BATCHES
from gllm.routing.policy_registry import POLICIES, make_policy
from gllm.routing.prefix_index import PromptBlockHashes
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork
from gllm.sim.cluster.cluster import (
    ClusterChange,
    ClusterRun,
    EngineDrain,
    EngineFailure,
    EngineStart,
    SimulatedCluster,
    simulate_cluster,
)
from gllm.sim.cluster.engine import ClusterEngine, ClusterEngineState, EngineLife
from gllm.sim.cluster.epoch import MeteredCostModel
from gllm.sim.cluster.requests import ClusterRequest, Submission, join_submissions
from gllm.sim.cluster.router import (
    ClusterRouter,
    PolicyRouter,
    RouterNeeds,
    make_router,
)
from gllm.sim.costs.base import ConstantCostModel
from gllm.sim.deployment import Deployment, roofline_deployment, simulate
from gllm.sim.event_loop import EventLoop
from gllm.sim.metrics.run_record import ServedRequest, build_run_record
from gllm.sim.replay import replay_calls
from gllm.sim.workloads.requests import WorkloadRequest, make_workload
from gllm.sim.workloads.sessions import PromptPart
from tests.support.examples import num_examples
from tests.support.other_hashes import run_with_other_hashes
from tests.support.sim.cluster_parts import (
    CountingRouter,
    FirstEngineRouter,
    make_deployment,
    token_times,
)
from tests.support.work import count_all_calls

SPARE_TIME = 30.0
"""Seconds after which an engine is there that nothing befalls."""

PAGE = Path(__file__).parents[2] / "docs" / "simulator-clusters.md"


@pytest.mark.parametrize("name", POLICIES)
def test_every_request_is_served_once(name: str) -> None:
    jobs = make_workload("uniform:8,200,2,30", 60, 20.0)
    run = simulate_cluster(simulated_pool("equal"), jobs, make_router(name, 0))
    served = [seq for engine in run.engines.values() for seq in engine.record.requests]
    assert sorted(served) == sorted(run.requests) == list(range(60))
    for index, request in run.requests.items():
        assert request.line.num_tokens == jobs[index].num_output_tokens
        assert request.line.arrival == pytest.approx(jobs[index].arrival_seconds, abs=2e-9)
    assert all(engine.record.requests for engine in run.engines.values())
    assert not run.unserved


@pytest.mark.parametrize("name", POLICIES)
def test_policies_name_all_that_they_read(name: str) -> None:
    """State that a router leaves out does not change a choice."""

    class AllKnowingRouter(PolicyRouter):
        def __init__(self) -> None:
            super().__init__(make_policy(name, Random(0)))
            self.needs, self.reads_engines = RouterNeeds(True, True, True, True), True

    jobs = make_workload("sessions:6,3,1,64,20,10", 40, 10.0)
    pool = simulated_pool("unequal")
    runs = [
        simulate_cluster(pool, jobs, each) for each in (make_router(name, 0), AllKnowingRouter())
    ]
    placements = [
        {engine: sorted(each.record.requests) for engine, each in run.engines.items()}
        for run in runs
    ]
    assert placements[0] == placements[1]


def test_router_that_reads_no_statistics_computes_none() -> None:
    jobs = make_workload("fixed:64,8", 30, 20.0)

    def count_statistics(name: str) -> int:
        pool, router = simulated_pool("equal"), make_router(name, 0)
        calls = count_all_calls(lambda: simulate_cluster(pool, jobs, router))
        return calls[Scheduler.stats.__code__]

    names = ("round-robin", "least-requests", "least-tokens")
    counts = {name: count_statistics(name) for name in names}
    # Each engine states its statistics at the end.
    assert counts == {"round-robin": 3, "least-requests": 3, "least-tokens": 3 * 30 + 3}


@pytest.mark.parametrize(("name", "reads_prefixes"), [("prefix-aware", True), ("random", False)])
def test_changes_of_prefix_caches_are_kept_for_routers_that_read_them(
    name: str, reads_prefixes: bool
) -> None:
    cluster = SimulatedCluster(make_router(name, 0))
    cluster.add_engine("e0", simulated_pool("equal")["e0"])
    log = cluster.engines["e0"].pipeline.scheduler.kv_cache.event_log
    assert (log is not None) == reads_prefixes
    # Hashes are enough for an index.
    assert log is None or not log.with_token_ids


def test_cluster_of_one_engine_is_that_engine() -> None:
    """The step log is the same, but for the name of the engine."""
    deployment = roofline_deployment("qwen2.5-14b", "L20", 2, 16_384)
    jobs = make_workload("azure-conv", 30, 2.0)
    alone: list[StepLogEvent] = []
    simulate(deployment, jobs, alone.append)
    in_cluster: list[StepLogEvent] = []
    simulate_cluster(
        {"a": deployment}, jobs, make_router("predict", 0), open_log=lambda _: in_cluster.append
    )
    assert in_cluster[0] == deployment.start_event(0.0, "a")
    assert in_cluster[1:] == alone[1:]


def count_per_row(num_engines: int) -> tuple[float, float]:
    """Return the events and the Python calls per row, at a constant load per engine."""
    jobs = make_workload("fixed:64,24", 20 * num_engines, 4.0 * num_engines, "burst:1")
    cluster = SimulatedCluster(make_router("least-requests", 0))
    for number in range(num_engines):
        cluster.add_engine(f"e{number}", simulated_pool("equal")["e0"])
    cluster.submit_each(jobs)
    calls = count_all_calls(cluster.loop.run)
    works = [
        batch.work
        for engine in cluster.run().engines.values()
        for batch in engine.record.micro_batches
    ]
    num_rows = sum(work.num_decodes + len(work.prefill_chunks) for work in works)
    return calls[EventLoop.push.__code__] / num_rows, calls.total() / num_rows


def test_events_and_calls_per_row_do_not_grow_with_engines() -> None:
    single, many = count_per_row(1), count_per_row(8)
    assert many[0] == pytest.approx(single[0], rel=0.02)
    # A policy looks at each engine once per request.
    assert many[1] == pytest.approx(single[1], rel=0.08)


def test_workload_is_read_as_its_requests_arrive() -> None:
    jobs = make_workload("fixed:64,8", 200, 20.0)
    num_read = 0

    def read() -> Iterator[WorkloadRequest]:
        nonlocal num_read
        for job in jobs:
            num_read += 1
            yield job

    cluster = SimulatedCluster(make_router("least-requests", 0))
    cluster.add_engine("e0", simulated_pool("equal")["e0"])
    cluster.submit_each(read())
    cluster.loop.run(until=jobs[99].arrival_seconds + 1e-6)
    assert 100 <= num_read <= 102
    assert sorted(cluster.run().requests) == list(range(200))


# The central queue.


def last_time(run: ClusterRun) -> float:
    """Return the time of a run's last token."""
    return max(request.line.times[-1] for request in run.requests.values())


def test_deferred_requests_wait_centrally_and_run_at_once_when_pulled() -> None:
    """Few requests wait in an engine, and those of the queue are served in order of arrival."""
    jobs = make_workload("fixed:64,40", 90, 1.0, "static")
    deferred = simulate_cluster(simulated_pool("unequal"), jobs, make_router("deferred", 0))
    blind = simulate_cluster(simulated_pool("unequal"), jobs, make_router("round-robin", 0))
    assert sorted(deferred.requests) == list(range(90))
    starts = [request.first_scheduled_time or 0.0 for request in deferred.requests.values()]
    # A step of the slowest engine takes 80 ms; a prompt fills it, and up to three may wait.
    num_steps = 1 + SPARE_BATCHES
    assert all(later >= earlier - num_steps * 0.081 for earlier, later in pairwise(starts))
    # The fast engine takes more requests, so the last one ends earlier.
    served = [len(engine.record.requests) for engine in deferred.engines.values()]
    assert served[0] > served[1] > served[2]
    assert last_time(deferred) < 0.7 * last_time(blind)


def mean_wait(num_engines: int, router: ClusterRouter) -> float:
    """Return the mean time to the first micro-batch, in service times, at a load of 0.7.

    An engine serves one request at a time, in a constant time.
    """
    service_seconds = 0.05
    pool = simulated_pool("equal")
    config = replace(pool["e0"].scheduler, max_num_seqs=1)
    engine = replace(pool["e0"], scheduler=config, cost=ConstantCostModel(service_seconds))
    jobs = make_workload("fixed:16,1", 8_000, 0.7 * num_engines / service_seconds, seed=2)
    run = simulate_cluster({f"e{number}": engine for number in range(num_engines)}, jobs, router)
    waits = [
        (request.first_scheduled_time or 0) - request.line.arrival
        for request in run.requests.values()
    ]
    return fmean(waits) / service_seconds


@pytest.mark.full
def test_random_routing_to_three_engines_is_three_md1_queues() -> None:
    """The mean wait of M/D/1 is load / (2 (1 - load)) service times (Pollaczek-Khinchine)."""
    assert mean_wait(3, make_router("random", 1)) == pytest.approx(0.7 / (2 * 0.3), rel=0.08)


def test_central_queue_of_two_engines_is_an_md2_queue() -> None:
    """The mean wait of M/D/c in relation to M/M/c is that of Cosmetatos (1976), c = 2."""
    load = 0.7
    exponential = load**2 / (1 - load**2)
    ratio = (1 + (1 - load) * (14**0.5 - 2) / (16 * load * 2)) / 2
    assert mean_wait(2, make_router("deferred", 0)) == pytest.approx(ratio * exponential, rel=0.05)


def test_priorities_are_kept_in_the_central_queue() -> None:
    jobs = [WorkloadRequest(0.0, 64, 40, priority=index % 2) for index in range(60)]
    run = simulate_cluster(simulated_pool("equal"), jobs, make_router("deferred", 0))
    starts = {index: request.first_scheduled_time or 0.0 for index, request in run.requests.items()}
    # The first requests find empty engines.
    urgent = [starts[index] for index in range(24, 60) if index % 2 == 0]
    others = [starts[index] for index in range(24, 60) if index % 2 == 1]
    assert max(urgent) <= min(others)


def test_unsorted_workload_and_too_long_requests_are_refused() -> None:
    jobs = make_workload("fixed:64,8", 4, 1.0)
    with pytest.raises(ValueError, match="sort"):
        simulate_cluster(simulated_pool("equal"), jobs[::-1], make_router("random", 0))
    long_jobs = make_workload("fixed:4000,8", 1, 1.0)
    with pytest.raises(ValueError, match=r"request of 4008 tokens.*max_model_len is 1024"):
        simulate_cluster(simulated_pool("equal"), long_jobs, make_router("random", 0))


def test_long_requests_go_to_engines_that_can_run_them() -> None:
    pool = simulated_pool("equal")
    large = replace(pool["e0"].scheduler, max_model_len=4096)
    deployments = {**pool, "large": replace(pool["e0"], scheduler=large)}
    jobs = make_workload("uniform:500,3000,8,9", 30, 2.0)
    run = simulate_cluster(deployments, jobs, make_router("round-robin", 0))
    assert sorted(run.requests) == list(range(30))
    for name in pool:
        record = run.engines[name].record
        assert all(request.num_prompt_tokens <= 1016 for request in record.requests.values())
    assert len(run.engines["large"].record.requests) > 15


@pytest.mark.parametrize("waits", [False, True])
def test_choice_of_an_unknown_engine_is_refused(waits: bool) -> None:
    """Also where an engine pulls: it is the only one that the router may choose."""

    class LostRouter(ClusterRouter):
        def route(
            self, request: ClusterRequest, engines: Sequence[ClusterEngine], now: float
        ) -> str | None:
            return "nobody" if engines or not waits else None

    start = EngineStart("e0", 1000.0, deployment=simulated_pool("equal")["e0"])
    pool, changes = ({}, [start]) if waits else (simulated_pool("equal"), [])
    message = f"router chose 'nobody', which is none of {'e0$' if waits else 'e0, e1, e2'}"
    with pytest.raises(ValueError, match=message):
        simulate_cluster(pool, make_workload("fixed:9,2", 1), LostRouter(), changes)


def test_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(example, names)
    assert [line[0] for line in capsys.readouterr().out.splitlines()[:3]] == ["a", "b", "c"]
    run = names["run"]
    assert len(run.requests) == 100
    assert not run.unserved
    assert len(run.engines["a"].lives) == 2
    assert run.engines["b"].lives[0].end_time > 12.0
    assert run.engines["c"].record.requests


def test_joined_record_has_the_preemptions_of_all_engines() -> None:
    submissions: list[Submission] = []
    job = WorkloadRequest(0.0, 8, 6)
    parts = {}
    for outputs, num_preemptions in ((), 2), (([1, 1],), 1):
        resumed = SchedulerRequest(0, range(8), 6, outputs=outputs)
        request = ClusterRequest(0, job, resumed, 0.0)
        line = RequestTimeline(0.0)
        line.record_output(1.0 + num_preemptions, 2)
        seq = len(submissions)
        submissions.append(request.describe_submission())
        parts[seq] = ServedRequest(8, 6, line, num_preemptions=num_preemptions)
        parts[seq].preempted_seconds = 0.5 * num_preemptions
    ((first_seq, joined),) = join_submissions([parts], submissions).values()
    assert first_seq == 0
    assert (joined.num_preemptions, joined.preempted_seconds) == (3, 1.5)
    assert (joined.num_resumptions, joined.line.num_tokens) == (1, 2)


def test_step_costs_of_an_engine_are_those_of_its_slowest_stage() -> None:
    class SlowFirstStage(ConstantCostModel):
        def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
            return 0.1 if stage else 0.3

    metered = MeteredCostModel(SlowFirstStage(0.1), 2)
    for step in range(200):
        work = StageWork(step, 4, (), 4, 4 * step, 4)
        assert [metered.stage_seconds(stage, work) for stage in range(2)] == [
            pytest.approx(0.3),
            0.1,
        ]
    coefficients = metered.fit.coefficients
    assert coefficients is not None
    assert coefficients.predict_seconds(work) == pytest.approx(0.3, rel=0.1)


# One change after the other, to the exact number.


def test_lost_request_goes_on_elsewhere_with_its_output() -> None:
    """The fourth step of 50 ms is lost, and a prefill of the prompt and the output follows."""
    jobs = [WorkloadRequest(0.0, 8, 6)]
    deployments = {"a": make_deployment(), "b": make_deployment()}

    failure = EngineFailure("a", 0.18, detection_seconds=1.0)
    run = simulate_cluster(deployments, jobs, FirstEngineRouter(), [failure])
    assert token_times(run) == [0.05, 0.1, 0.15, 1.23, 1.28, 1.33]
    assert run.requests[0].num_resumptions == 1
    (resumed,) = run.engines["b"].record.micro_batches[:1]
    assert resumed.work.num_tokens == 8 + 3
    assert run.engines["a"].lives == [EngineLife(0.0, 0.0, 0.18)]


def test_requests_sent_to_a_dead_engine_are_routed_again_when_its_death_is_known() -> None:
    jobs = [WorkloadRequest(time, 8, 2) for time in (0.0, 0.4, 0.9)]
    failure = EngineFailure("a", 0.2, detection_seconds=0.3, restart_seconds=2.0)
    run = simulate_cluster({"a": make_deployment()}, jobs, CountingRouter(), [failure])
    assert token_times(run) == [0.05, 0.1]
    # The second is sent to the dead engine, the third waits in the queue: both start at 0.5 + 2 s.
    assert token_times(run, 1) == token_times(run, 2) == [2.55, 2.6]
    assert run.requests[1].line.arrival == pytest.approx(0.4)
    assert run.engines["a"].lives == [EngineLife(0.0, 0.0, 0.2), EngineLife(0.5, 2.5)]
    assert len(run.engines["a"].record.restarts) == 1


def test_draining_engine_serves_its_requests_and_gets_no_new_ones() -> None:
    jobs = [WorkloadRequest(time, 8, 10) for time in (0.0, 0.01, 0.2, 0.21)]
    deployments = {"a": make_deployment(), "b": make_deployment()}
    drain = EngineDrain("a", 0.1)
    run = simulate_cluster(deployments, jobs, CountingRouter(), [drain])
    (kept,) = run.engines["a"].record.requests.values()
    assert (kept.line.num_tokens, kept.num_resumptions) == (10, 0)
    assert len(run.engines["b"].record.requests) == 3
    assert run.engines["a"].lives == [EngineLife(0.0, 0.0, kept.line.times[-1])]
    migrated = simulate_cluster(
        deployments, jobs, CountingRouter(), [replace(drain, migrates=True)]
    )
    assert migrated.engines["a"].lives == [EngineLife(0.0, 0.0, 0.1)]
    assert len(migrated.engines["b"].record.requests) == 4
    assert all(request.line.num_tokens == 10 for request in migrated.requests.values())


def test_new_engine_takes_requests_after_its_start_up() -> None:
    jobs = [WorkloadRequest(0.1 * index, 8, 2) for index in range(100)]
    start = EngineStart("b", 1.0, startup_seconds=4.0, deployment=make_deployment())
    run = simulate_cluster({"a": make_deployment()}, jobs, CountingRouter(), [start])
    assert run.engines["b"].lives == [EngineLife(1.0, 5.0)]
    record = run.engines["b"].record
    assert min(served.line.arrival for served in record.requests.values()) >= 5.0
    assert len(record.requests) > 10


def test_engine_that_dies_while_it_starts_begins_again() -> None:
    changes: list[ClusterChange] = [
        EngineFailure("a", 0.0, restart_seconds=3.0),
        EngineFailure("a", 1.0, detection_seconds=0.5, restart_seconds=3.0),
    ]
    jobs = [WorkloadRequest(0.2, 8, 1)]
    run = simulate_cluster({"a": make_deployment()}, jobs, CountingRouter(), changes)
    lives = [EngineLife(0.0, 0.0, 0.0), EngineLife(0.0, None, 1.0), EngineLife(1.5, 4.5)]
    assert run.engines["a"].lives == lives
    assert token_times(run) == [4.55]


def test_requests_without_an_engine_are_named() -> None:
    jobs = [WorkloadRequest(time, 8, 4) for time in (0.0, 5.0)]
    failure = EngineFailure("a", 0.12)
    run = simulate_cluster({"a": make_deployment()}, jobs, CountingRouter(), [failure])
    assert run.unserved == [0, 1]
    assert {index: request.line.num_tokens for index, request in run.requests.items()} == {0: 2}


def test_requests_wait_for_the_first_engine() -> None:
    jobs = [WorkloadRequest(0.0, 8, 2)]
    start = EngineStart("a", 1.0, startup_seconds=2.0, deployment=make_deployment())
    run = simulate_cluster({}, jobs, CountingRouter(), [start])
    assert token_times(run) == [3.05, 3.1]
    assert simulate_cluster({}, jobs, CountingRouter()).unserved == [0]


def test_requests_sent_to_a_dead_engine_count_as_its_load() -> None:
    jobs = [WorkloadRequest(0.01 * index, 8, 20) for index in range(10)]
    failure = EngineFailure("a", 0.0, detection_seconds=10.0)
    deployments = {"a": make_deployment(), "b": make_deployment()}
    run = simulate_cluster(deployments, jobs, CountingRouter(), [failure])
    starts = [request.first_scheduled_time or 0.0 for request in run.requests.values()]
    assert sum(start >= 10.0 for start in starts) == 5


def test_prefix_cache_of_a_lost_engine_is_forgotten() -> None:
    prompt = (PromptPart(0, 8),)
    jobs = [WorkloadRequest(time, 8, 2, prompt) for time in (0.0, 1.0, 2.0)]
    caches: list[tuple[list[ClusterChange], dict[str, int]]] = [
        ([], {"a": 2}),
        ([EngineFailure("a", 2.5)], {}),
    ]
    for failures, cached in caches:
        policy = make_policy("predict", Random(0))
        simulate_cluster({"a": make_deployment()}, jobs, PolicyRouter(policy), failures)
        assert policy.prefixes.cached_blocks(PromptBlockHashes(range(8), 4)) == cached


def test_end_of_a_drain_does_not_end_the_next_life() -> None:
    changes: list[ClusterChange] = [
        EngineDrain("a", 1.0),
        EngineDrain("a", 1.0, migrates=True),
        EngineStart("a", 1.0),
    ]
    jobs = [WorkloadRequest(2.0, 8, 1)]
    run = simulate_cluster({"a": make_deployment()}, jobs, CountingRouter(), changes)
    assert run.engines["a"].lives == [EngineLife(0.0, 0.0, 1.0), EngineLife(1.0, 1.0)]
    assert token_times(run) == [2.05]


@pytest.mark.parametrize("numbers", [(1, 3), (3, 1)])
def test_engine_may_start_again_with_another_number_of_stages(numbers: tuple[int, int]) -> None:
    first, second = numbers
    jobs = [WorkloadRequest(0.0, 8, 2), WorkloadRequest(2.0, 8, 2)]
    changes: list[ClusterChange] = [
        EngineDrain("a", 1.0),
        EngineStart("a", 1.5, deployment=make_deployment(second)),
    ]
    logs: dict[str, list[StepLogEvent]] = {}
    run = simulate_cluster(
        {"a": make_deployment(first)},
        jobs,
        CountingRouter(),
        changes,
        lambda name: logs.setdefault(name, []).append,
    )
    for record in (run.engines["a"].record, build_run_record(logs["a"])):
        busy = [round(usage.busy, 9) for usage in record.stage_usages()]
        assert busy == [0.2, 0.1, 0.1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: EngineFailure("c", 1.0), "EngineFailure at 1.0 s: engine 'c' is none of a, b"),
        (lambda: EngineStart("c", 1.0), "engine 'c' is none of a, b: start it earlier"),
        (lambda: EngineStart("a", 1.0), "engine 'a' is to start at 1.0 s, but is ready then"),
        (lambda: EngineDrain("a", -1.0), "EngineDrain: time is -1.0, but must be at least 0"),
        (
            lambda: EngineFailure("a", 1.0, restart_seconds=float("inf")),
            "EngineFailure: restart_seconds is inf",
        ),
    ],
)
def test_impossible_changes_are_refused(change: object, message: str) -> None:
    deployments = {"a": make_deployment(), "b": make_deployment()}
    with pytest.raises(ValueError, match=message):
        simulate_cluster(deployments, [], CountingRouter(), [change()])  # type: ignore[operator]


# Whatever happens.

times = st.floats(0.0, 8.0).map(lambda seconds: round(seconds, 2))


@st.composite
def clusters(draw: st.DrawFn) -> tuple[dict[str, Deployment], list[WorkloadRequest]]:
    """Return engines with small caches, and requests that fit each of them."""
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    deployments = {
        name: make_deployment(
            draw(st.integers(1, 3)),
            draw(st.integers(16, 24)),
            draw(st.sampled_from(["throttle", "sarathi"])),
        )
        for name in names
    }
    lengths = st.tuples(st.integers(1, 24), st.integers(1, 10))
    arrivals = sorted(draw(st.lists(times, min_size=1, max_size=12)))
    return deployments, [WorkloadRequest(time, *draw(lengths)) for time in arrivals]


@st.composite
def failures(draw: st.DrawFn, names: list[str]) -> list[ClusterChange]:
    """Return failures and drains of engines, and the start of one that nothing befalls."""
    changes: list[ClusterChange] = []
    for _ in range(draw(st.integers(1, 5))):
        name, time = draw(st.sampled_from(names)), draw(times)
        if draw(st.integers(0, 4)):
            detection = draw(st.sampled_from([0.0, 0.03, 0.5]))
            restart = draw(st.sampled_from([None, 0.0, 0.04, 2.0]))
            changes.append(EngineFailure(name, time, detection, restart))
        else:
            changes.append(EngineDrain(name, time, draw(st.booleans())))
    spare = make_deployment(2)
    return [*changes, EngineStart("spare", SPARE_TIME, draw(times), spare)]


def check_run(
    cluster: SimulatedCluster, run: ClusterRun, jobs: list[WorkloadRequest], ends: Counter[int]
) -> None:
    """Every request ends once with all its tokens, and nothing is left behind."""
    assert ends == dict.fromkeys(range(len(jobs)), 1)
    assert not run.unserved
    assert sorted(run.requests) == list(range(len(jobs)))
    for index, job in enumerate(jobs):
        line = run.requests[index].line
        assert line.num_tokens == len(line.times) == job.num_output_tokens
        assert line.times == sorted(line.times)
        assert line.times[0] > line.arrival == pytest.approx(job.arrival_seconds)
    for name, engine in cluster.engines.items():
        assert not engine.num_requests
        for batch in run.engines[name].record.micro_batches:
            assert any(
                life.ready_time is not None
                and life.ready_time <= batch.planned_time <= (life.end_time or 1e9)
                for life in run.engines[name].lives
            )
        if engine.state is ClusterEngineState.READY:
            assert run.engines[name].stats.unfinished == run.engines[name].stats.in_flight == 0
            assert run.engines[name].stats.kv_usage == 0.0


@pytest.mark.parametrize("is_deferred", [False, True], ids=["least requests", "deferred"])
@settings(
    max_examples=num_examples(40, 1500), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(data=st.data())
def test_every_request_ends_once_whatever_dies(is_deferred: bool, data: st.DataObject) -> None:
    deployments, jobs = data.draw(clusters())
    changes = data.draw(failures(list(deployments)))
    router = CountingRouter(make_router("deferred", 0) if is_deferred else None)
    cluster = SimulatedCluster(router)
    for name, deployment in deployments.items():
        cluster.add_engine(name, deployment)
    cluster.apply_each(changes)
    cluster.submit_each(jobs)
    check_run(cluster, cluster.run(), jobs, router.num_ends)


def logged_run(seed: int) -> tuple[ClusterRun, dict[str, list[StepLogEvent]]]:
    """Return a run with failures, and the step log of each engine."""
    random = Random(seed)
    jobs = make_workload("uniform:8,40,4,20", 40, 8.0, seed=seed)
    deployments = {name: make_deployment(2, 30) for name in "abc"}
    changes: list[ClusterChange] = [
        EngineFailure(name, random.uniform(0.5, 3.0), random.uniform(0.0, 0.5), restart_seconds=0.2)
        for name in "abc"
    ]
    logs: dict[str, list[StepLogEvent]] = {}
    run = simulate_cluster(
        deployments,
        jobs,
        PolicyRouter(make_policy("predict", Random(seed))),
        changes,
        lambda name: logs.setdefault(name, []).append,
    )
    return run, logs


def encode_logs(seed: int) -> bytes:
    """Return the step logs of a run as bytes."""
    return msgspec.json.encode(logged_run(seed)[1])


def test_two_runs_of_a_seed_are_equal_to_the_byte() -> None:
    assert encode_logs(3) == encode_logs(3) != encode_logs(4)


@pytest.mark.full
def test_run_does_not_depend_on_the_hashes_of_a_process() -> None:
    code = (
        "import sys; from tests.sim.test_cluster import encode_logs;"
        "sys.stdout.buffer.write(encode_logs(3))"
    )
    assert run_with_other_hashes(code) == encode_logs(3)


@pytest.mark.parametrize("seed", range(4))
def test_record_of_an_engine_is_that_of_its_log(seed: int) -> None:
    run, logs = logged_run(seed)
    assert sum(request.num_resumptions for request in run.requests.values()) > 0
    for name, engine in run.engines.items():
        assert replay_calls(logs[name]).share == 1.0
        read = build_run_record(logs[name])
        assert read.start == engine.record.start
        assert read.start.engine == name
        assert read.restarts == engine.record.restarts
        assert read.requests.keys() == engine.record.requests.keys()
        for seq, served in engine.record.requests.items():
            assert read.requests[seq].line == served.line
            assert read.requests[seq].num_resumptions == served.num_resumptions
            assert read.requests[seq].num_preemptions == served.num_preemptions
        for expected, batch in zip(read.micro_batches, engine.record.micro_batches, strict=True):
            assert expected.work == batch.work
            assert expected.stage_times == batch.stage_times
        usages = zip(read.stage_usages(), engine.record.stage_usages(), strict=True)
        for expected_usage, usage in usages:
            assert usage.busy == pytest.approx(expected_usage.busy)
            assert usage.bubble == pytest.approx(expected_usage.bubble)
