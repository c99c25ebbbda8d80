"""Engines that fail, drain and start: no request is lost or served twice, whatever happens."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gllm.observability.step_log import StepLogEvent
from gllm.routing.policy_registry import make_policy
from gllm.routing.prefix_index import PromptBlockHashes
from gllm.sim.cluster.cluster import (
    ClusterChange,
    ClusterRun,
    EngineDrain,
    EngineFailure,
    EngineStart,
    SimulatedCluster,
    simulate_cluster,
)
from gllm.sim.cluster.engine import ClusterEngineState, EngineLife
from gllm.sim.cluster.router import DeferredRouter, PolicyRouter
from gllm.sim.deployment import Deployment
from gllm.sim.metrics.run_record import build_run_record
from gllm.sim.replay import replay_calls
from gllm.sim.workloads.requests import WorkloadRequest, make_workload
from gllm.sim.workloads.sessions import PromptPart
from tests.support.examples import num_examples
from tests.support.sim.cluster_parts import (
    CountingRouter,
    FirstEngineRouter,
    make_deployment,
    token_times,
)

SPARE_TIME = 30.0
"""Seconds after which an engine is there that nothing befalls."""


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
    assert all(each.line.num_tokens == 10 for each in migrated.requests.values())


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
    assert {index: each.line.num_tokens for index, each in run.requests.items()} == {0: 2}


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
    starts = [each.first_scheduled_time or 0.0 for each in run.requests.values()]
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
    router = CountingRouter(DeferredRouter() if is_deferred else None)
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
        "import sys; from tests.sim.test_cluster_changes import encode_logs;"
        "sys.stdout.buffer.write(encode_logs(3))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        check=True,
    )
    assert other.stdout == encode_logs(3)


@pytest.mark.parametrize("seed", range(4))
def test_record_of_an_engine_is_that_of_its_log(seed: int) -> None:
    run, logs = logged_run(seed)
    assert sum(each.num_resumptions for each in run.requests.values()) > 0
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
