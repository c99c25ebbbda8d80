"""Bubbles while a pipeline runs: hand-made times, and the figures of a log read afterwards."""

import pytest

from gllm.observability.bubbles import BubbleMeter
from gllm.observability.step_log import ScheduleEvent, StageTimesEvent, StepLogEvent
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import StepTime
from gllm.sim.deployment import roofline_deployment, simulate
from gllm.sim.metrics.run_record import RunRecord, build_run_record
from gllm.sim.workloads.requests import make_workload


def test_a_stage_without_a_step_while_there_is_work_for_both() -> None:
    meter = BubbleMeter(2, begin=100.0)
    meter.record_parallelism(110.0, 1)
    meter.record_parallelism(112.0, 2)
    meter.record_parallelism(117.0, 0)
    meter.record_steps(0, [StepTime(0, 110.0, 113.0), StepTime(1, 114.0, 116.0)], until=120.0)
    assert meter.totals.bubble_seconds == [0.0, 0.0], "stage 1 has not told what it did"
    meter.record_steps(1, [StepTime(0, 113.0, 114.0), StepTime(1, 116.0, 117.0)], until=120.0)
    # 110-112: work for one, stage 0 does it. Then stage 0 is idle 113-114 and 116-117, 1 until 116
    # but for 113-114. After 117 there is nothing to do.
    assert meter.totals.work_seconds == 7.0
    assert meter.totals.bubble_seconds == [2.0, 1.0 + 2.0]


def test_what_is_missing_is_shared_by_the_idle_stages() -> None:
    meter = BubbleMeter(4, begin=0.0)
    meter.record_parallelism(0.0, 3)
    for stage in range(4):
        meter.record_steps(stage, [StepTime(0, 0.0, 6.0)] if stage == 2 else [], until=6.0)
    assert meter.totals.bubble_seconds == pytest.approx([4.0, 4.0, 0.0, 4.0])


def test_time_counts_up_to_where_all_stages_have_told() -> None:
    meter = BubbleMeter(2, begin=0.0)
    meter.record_parallelism(0.0, 2)
    meter.record_steps(0, [], until=5.0)
    meter.record_steps(1, [], until=3.0)
    assert (meter.totals.work_seconds, meter.totals.bubble_seconds) == (3.0, [3.0, 3.0])
    # A step that began before what was told as the last moment counts from there.
    meter.record_steps(1, [StepTime(0, 2.9, 4.0)], until=5.0)
    assert (meter.totals.work_seconds, meter.totals.bubble_seconds) == (5.0, [5.0, 4.0])


def live(events: list[StepLogEvent], run: RunRecord) -> BubbleMeter:
    """What a driver would have added up over a log's calls."""
    meter = BubbleMeter(len(run.start.layers), run.start.time)
    for event in events:
        match event:
            case ScheduleEvent():
                meter.record_parallelism(event.time, event.parallelism)
            case StageTimesEvent():
                latest = max(time.end for time in event.steps)
                meter.record_steps(event.stage, event.steps, latest)
    for stage in range(len(run.start.layers)):
        meter.record_steps(stage, [], run.end_time())
    return meter


@pytest.mark.parametrize(("stages", "policy"), [(1, "sarathi"), (2, "throttle"), (4, "sarathi")])
def test_the_figures_are_those_of_the_step_log(stages: int, policy: str) -> None:
    scheduler = SchedulerConfig(policy=policy)
    deployment = roofline_deployment("qwen2.5-14b", "A100-40G", stages, 4096, scheduler=scheduler)
    events: list[StepLogEvent] = []
    simulate(deployment, make_workload("uniform:16,900,8,60", 60, 8.0), events.append)
    run = build_run_record(events)
    uses, meter = run.stage_usages(), live(events, run)
    assert meter.totals.bubble_seconds == pytest.approx([use.bubble for use in uses])
    assert stages == 1 or min(meter.totals.bubble_seconds) > 0
    assert meter.totals.work_seconds <= uses[0].span * (1 + 1e-9)
