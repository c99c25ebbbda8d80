"""Speculation in the simulator: text comes faster as far as guesses are right, and step logs."""

from typing import Any

import pytest

from gllm.observability.logged_scheduler import replay_event
from gllm.observability.step_log import ScheduleEvent, StartEvent, StepLogEvent
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.speculative_config import SpeculativeConfig
from gllm.sim.deployment import Deployment, roofline_deployment, simulate
from gllm.sim.metrics.run_record import build_run_record
from gllm.sim.options import SimulationConfig
from gllm.sim.workloads.requests import WorkloadRequest


def deployment(acceptance: float | None, stages: int = 4) -> Deployment:
    """Four L20s with a 32B model, or one with a 7B model.

    acceptance: rate of right guesses; None without speculation.
    """
    config = None
    if acceptance is not None:
        config = SpeculativeConfig(4, "synthetic", synthetic_acceptance_rate=acceptance)
    scheduler = SchedulerConfig(speculative_config=config)
    model = "qwen2.5-32b" if stages == 4 else "qwen2.5-7b"
    return roofline_deployment(model, "L20", stages, 4096, scheduler=scheduler)


def seconds(acceptance: float | None, num_streams: int, stages: int = 4) -> float:
    """Time until all streams have 64 tokens."""
    jobs = [WorkloadRequest(0.0, 100, 64) for _ in range(num_streams)]
    record = simulate(deployment(acceptance, stages), jobs)
    assert all(request.line.num_tokens == 64 for request in record.requests.values())
    return max(request.line.times[-1] for request in record.requests.values())


def test_one_stream_uses_the_stages_that_would_be_idle() -> None:
    """Four stages verify one window each: at 100 % a step is a window."""
    plain, wrong, right = (seconds(acceptance, 1) for acceptance in (None, 0.0, 1.0))
    assert plain / right > 8
    assert seconds(0.8, 1) < 0.5 * plain
    assert wrong < 1.04 * plain


@pytest.mark.parametrize("acceptance", [0.0, pytest.param(0.7, marks=pytest.mark.full)])
def test_many_streams_are_not_slower(acceptance: float) -> None:
    plain = seconds(None, 64)
    assert seconds(acceptance, 64) < 1.03 * plain


@pytest.mark.parametrize("num_streams", [2, 16, pytest.param(100, marks=pytest.mark.full)])
def test_async_scheduling_keeps_its_speed(num_streams: int) -> None:
    """One stage: wrong guesses cost a few steps, and right ones pay where rows are few."""
    plain, wrong, right = (
        seconds(acceptance, num_streams, stages=1) for acceptance in (None, 0.0, 0.9)
    )
    assert wrong < 1.05 * plain
    assert right < (0.7 if num_streams < 100 else 1.01) * plain


def test_a_step_log_is_replayed_and_read() -> None:
    events: list[StepLogEvent] = []
    jobs = [WorkloadRequest(0.1 * i, 50, 30) for i in range(6)]
    simulated = simulate(deployment(0.6), jobs, log=events.append)
    start = events[0]
    assert isinstance(start, StartEvent)
    scheduler = Scheduler(start.scheduler)
    for event in events[1:]:
        plan = replay_event(scheduler, event)
        if isinstance(event, ScheduleEvent):
            assert plan == event.plan
    read = build_run_record(events)
    assert [request.line.times for request in read.requests.values()] == [
        request.line.times for request in simulated.requests.values()
    ]


@pytest.mark.parametrize("fields", [{"method": "mtp"}, {"method": "draft_model", "model": "a"}])
def test_drafts_with_weights_are_refused(fields: dict[str, Any]) -> None:
    scheduler = SchedulerConfig(speculative_config=SpeculativeConfig(**fields))
    with pytest.raises(ValueError, match="choose method synthetic"):
        SimulationConfig(scheduler=scheduler)
