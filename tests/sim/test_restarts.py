"""Logs with restarts: replayed, and read as one run."""

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
from gllm.sim.run_record import RunRecord, build_run_record

START = StartEvent(0.0, "m", [1, 1], SchedulerConfig().resolve(2, 100, 100), "driver", warm_ups=1)
RESTART = RestartEvent(20.0, 2, "stage 0 was killed", 2, [1, 1], START.scheduler, warm_ups=1)


def row(seq: int, start: int, tokens: int = 1, epoch: int = 0) -> ScheduledRow:
    return ScheduledRow(seq, epoch, start, tokens, [], [5], True)


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
    plan(12.0, 2, 2, row(2, 3), row(1, 4), row(3, 4, epoch=2)),
    *ran(2, 12.0),
    commit(14.0, 2, 2, 1, 3, token=9),
    plan(14.0, 2, 3, row(3, 5, epoch=2)),
    RESTART,
    AddEvent(20.0, 4, [0], 1),
    plan(20.0, 1, 0, row(4, 0)),
    commit(21.0, 0, 4),
    # The client had one token of request 3; the other one is generated again.
    AddEvent(21.0, 5, [8] * 4, 3, outputs=[[5]], age_seconds=11.0),
    AddEvent(21.5, 6, [8] * 4, 3),
    plan(22.0, 2, 1, row(5, 0, 5, epoch=1), row(6, 0, 4)),
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


def test_warm_ups_of_every_generation_are_left_out(run: RunRecord) -> None:
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
