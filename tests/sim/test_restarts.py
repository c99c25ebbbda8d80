"""Logs with restarts: replayed, and read as one run."""

from collections import Counter
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from gllm.observability.step_log import (
    AddEvent,
    CommitEvent,
    RestartEvent,
    ScheduleEvent,
    StageTimesEvent,
    StartEvent,
    StepLogEvent,
)
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import (
    SampledToken,
    ScheduledRow,
    StepPlan,
    StepResult,
    StepTime,
)
from gllm.scheduler.sequence import SchedulerRequest
from gllm.sim.costs.base import ConstantCostModel
from gllm.sim.deployment import Deployment, roofline_deployment, simulate_scheduler_requests
from gllm.sim.metrics.report import format_metrics_table, summarize_run
from gllm.sim.metrics.run_record import RunRecord, build_run_record
from gllm.sim.replay import replay_calls, replay_step_times
from gllm.sim.workloads.requests import OUTPUT_TOKEN_ID, make_workload
from tests.support.full_cases import full_but
from tests.support.sim.requests import to_scheduler_requests
from tests.support.sim.step_logs import lengthen_first_row

LEARNED = {bits: [1] * 8 for bits in range(1, 20)}
"""Output lengths with which a scheduler expects every output to be over soon."""


def interrupted_run(num_deaths: int, seed: int) -> list[StepLogEvent]:
    """A simulated run whose driver died: each epoch takes up what the one before left."""
    random = Random(seed)
    config = SchedulerConfig(policy="throttle")
    deployment = roofline_deployment("qwen2.5-14b", "A100-40G", 4, 16384, scheduler=config)
    requests = to_scheduler_requests(make_workload("sharegpt-like", 24, 4.0, "gamma:2", seed))
    events: list[StepLogEvent] = []
    for epoch in range(1, num_deaths + 2):
        _, logged = simulate_scheduler_requests(
            replace(deployment, output_lengths=LEARNED if epoch > 1 else None), requests
        )
        start = logged[0]
        assert isinstance(start, StartEvent)
        if epoch > 1:
            cause, layers = "stage 0 was killed", start.layers
            logged[0] = RestartEvent(
                start.time,
                epoch,
                cause,
                len(requests),
                layers,
                start.scheduler,
                output_lengths=LEARNED,
            )
        if epoch > num_deaths:
            return [*events, *logged]
        cut = random.randrange(len(logged) // 4, len(logged) // 2)
        events += logged[:cut]
        requests = resubmitted(requests, logged[:cut], 1000 * epoch)
    raise AssertionError("the last epoch returns")


def resubmitted(
    requests: list[tuple[float, SchedulerRequest]], log: list[StepLogEvent], next_seq: int
) -> list[tuple[float, SchedulerRequest]]:
    """The requests that a log leaves unfinished, five seconds later; those to come as they are."""
    resume = log[-1].time + 5.0
    tokens = Counter(
        sampled.seq
        for event in log
        if isinstance(event, CommitEvent)
        for sampled in event.result.sampled_tokens
    )
    left: list[tuple[float, SchedulerRequest]] = []
    for time, request in requests:
        output = [
            *(request.outputs[0] if request.outputs else []),
            *[OUTPUT_TOKEN_ID] * tokens[request.seq],
        ]
        if len(output) == request.max_tokens:
            continue
        age = request.age_seconds + resume - time
        left.append(
            (
                max(time, resume),
                SchedulerRequest(
                    next_seq + len(left),
                    request.prompt_token_ids,
                    request.max_tokens,
                    outputs=[output] if output else [],
                    age_seconds=max(0.0, age),
                ),
            )
        )
    return left


@pytest.mark.parametrize(
    ("num_deaths", "seed"), full_but([(2, 0)], list(product((1, 2), range(3))))
)
def test_replay_follows_restarts(num_deaths: int, seed: int) -> None:
    events = interrupted_run(num_deaths, seed)
    assert sum(isinstance(event, RestartEvent) for event in events) == num_deaths
    calls, times = replay_calls(events), replay_step_times(events)
    plans = [e for e in events if isinstance(e, ScheduleEvent) and e.plan is not None]
    assert calls.num_plans == len(plans) == times.num_plans
    assert calls.num_equal == calls.num_plans
    assert times.share == 1.0


def test_replay_follows_the_lengths_that_a_restart_begins_with() -> None:
    config = SchedulerConfig(prefix_cache=False).resolve(1, 40, 512)
    deployment = Deployment("m", [1], ConstantCostModel(0.01), config, LEARNED)
    jobs = make_workload("uniform:20,100,50,90", 20, 1e3, "poisson", 0)
    _, logged = simulate_scheduler_requests(deployment, to_scheduler_requests(jobs))
    start = logged[0]
    assert isinstance(start, StartEvent)
    restart = RestartEvent(1.0, 2, "killed", 0, [1], config, output_lengths=LEARNED)
    events = [start, restart, *logged[1:]]
    assert replay_calls(events).share == replay_step_times(events).share == 1.0
    with pytest.raises(ValueError, match="lacks sequence"):
        replay_calls([start, *logged[1:]])


def test_replay_follows_ranks() -> None:
    """Epochs with other ranks are replayed by their own times."""
    config = SchedulerConfig(prefix_cache=False)
    jobs = make_workload("uniform:20,200,5,20", 30, 4.0, "poisson", 0)
    logs = []
    for degrees in ([2, 1], [1, 2]):
        deployment = roofline_deployment(
            "qwen2.5-14b", "A100-40G", 2, 4096, scheduler=config, degrees=degrees
        )
        logs.append(simulate_scheduler_requests(deployment, to_scheduler_requests(jobs))[1])
    first, second = (log[0] for log in logs)
    assert isinstance(first, StartEvent)
    assert isinstance(second, StartEvent)
    restart = RestartEvent(
        second.time, 2, "killed", 0, second.layers, second.scheduler, degrees=second.degrees
    )
    events = [*logs[0], restart, *logs[1][1:]]
    assert (first.degrees, restart.degrees) == ([2, 1], [1, 2])
    calls, times = replay_calls(events), replay_step_times(events)
    assert calls.share == times.share == 1.0
    assert times.num_plans == calls.num_plans > 60


def test_a_changed_plan_after_a_restart_is_noticed() -> None:
    events = interrupted_run(1, seed=0)
    restart = next(i for i, event in enumerate(events) if isinstance(event, RestartEvent))
    index, event = next(
        (i, e)
        for i, e in enumerate(events)
        if i > restart and isinstance(e, ScheduleEvent) and e.plan is not None
    )
    assert isinstance(event.plan, StepPlan)
    forged = lengthen_first_row(event.plan)
    events[index] = ScheduleEvent(event.time, forged, event.parallelism)
    agreement = replay_calls(events)
    assert agreement.num_equal == agreement.num_plans - 1


def test_a_resumed_request_is_one_request_of_the_run() -> None:
    events = interrupted_run(2, seed=0)
    run = build_run_record(events)
    assert len(run.requests) == 24
    assert len(run.restarts) == 2
    assert all(served.line.num_tokens == served.max_tokens for served in run.requests.values())
    resumed = [served for served in run.requests.values() if served.num_resumptions]
    assert resumed
    assert {served.num_resumptions for served in resumed} <= {1, 2}
    assert all(served.line.times == sorted(served.line.times) for served in resumed)
    summary = summarize_run(run)
    assert (summary["restarts"], summary["resumed_requests"]) == (2, len(resumed))
    assert "resumed requests" in format_metrics_table({"a": summary})


START = StartEvent(0.0, "m", [1, 1], SchedulerConfig().resolve(2, 100, 100), "driver", warm_ups=1)
RESTART = RestartEvent(20.0, 2, "stage 0 was killed", 2, [1, 1], START.scheduler, warm_ups=1)


def row(seq: int, start: int, tokens: int = 1, num_preemptions: int = 0) -> ScheduledRow:
    return ScheduledRow(seq, num_preemptions, start, tokens, [], [5], True)


def plan(time: float, parallelism: int, step: int, *rows: ScheduledRow) -> ScheduleEvent:
    return ScheduleEvent(time, StepPlan(step, list(rows), []), parallelism)


def commit(time: float, step: int, *seqs: int, token: int = 5) -> CommitEvent:
    return CommitEvent(time, StepResult(step, [SampledToken(seq, 0, token) for seq in seqs]))


def ran(step: int, begin: float) -> list[StepLogEvent]:
    """Times of a step that took each of the two stages a second."""
    return [
        StageTimesEvent(begin + 2.0, stage, [StepTime(step, begin + stage, begin + stage + 1.0)])
        for stage in range(2)
    ]


LOG: list[StepLogEvent] = [
    START,
    AddEvent(0.0, 0, [0], 1),
    plan(0.0, 1, 0, row(0, 0)),
    commit(0.5, 0, 0),
    AddEvent(10.0, 1, [7] * 4, 4, stop_ids=[9], n=2),
    AddEvent(10.0, 3, [8] * 4, 3),
    plan(10.0, 2, 1, row(1, 0, 4), row(3, 0, 4)),
    *ran(1, 10.0),
    commit(12.0, 1, 1, 3),
    plan(12.0, 2, 2, row(2, 3), row(1, 4), row(3, 4, num_preemptions=2)),
    *ran(2, 12.0),
    commit(14.0, 2, 2, 1, 3, token=9),
    plan(14.0, 2, 3, row(3, 5, num_preemptions=2)),
    RESTART,
    AddEvent(20.0, 4, [0], 1),
    plan(20.0, 1, 0, row(4, 0)),
    commit(21.0, 0, 4),
    # The client had one token of request 3; the other one is generated again.
    AddEvent(21.0, 5, [8] * 4, 3, outputs=[[5]], age_seconds=11.0),
    AddEvent(21.5, 6, [8] * 4, 3),
    plan(22.0, 2, 1, row(5, 0, 5, num_preemptions=1), row(6, 0, 4)),
    *ran(1, 22.0),
    commit(24.0, 1, 5, 6),
]


@pytest.fixture
def run() -> RunRecord:
    return build_run_record(LOG)


def test_timelines_go_on_after_a_restart(run: RunRecord) -> None:
    assert sorted(run.requests) == [1, 2, 3, 6]
    assert run.requests[3].line.arrival == 10.0
    assert run.requests[3].line.times == [12.0, 24.0]
    assert run.requests[3].num_preemptions == 3
    assert [run.requests[seq].num_resumptions for seq in sorted(run.requests)] == [0, 0, 1, 0]
    assert run.requests[6].line.times == [24.0]


def test_warm_ups_of_every_epoch_are_left_out(run: RunRecord) -> None:
    assert [step.planned_time for step in run.micro_batches] == [10.0, 12.0, 14.0, 22.0]
    assert len(build_run_record(LOG, warm_ups=True).requests) == 6


def test_a_recovery_is_no_bubble(run: RunRecord) -> None:
    # 10-14: work for both stages, one of them computes at a time. 14-20: the recovery.
    # 22-24: as before. 20-22: the warm-up keeps one stage busy, of which no times came.
    uses = run.stage_usages()
    assert [use.busy for use in uses] == [3.0, 3.0]
    assert sum(use.bubble for use in uses) == pytest.approx(6.0 + 2.0)


def test_of_equal_requests_the_one_that_arrived_then_is_resumed() -> None:
    log: list[StepLogEvent] = [
        START,
        AddEvent(0.0, 0, [0], 1),
        AddEvent(5.0, 1, [7], 4),
        AddEvent(6.0, 2, [7], 4),
        RESTART,
        AddEvent(20.0, 3, [0], 1),
        AddEvent(21.0, 4, [7], 4, age_seconds=15.01),
    ]
    run = build_run_record(log)
    assert [run.requests[seq].num_resumptions for seq in (1, 2)] == [0, 1]
