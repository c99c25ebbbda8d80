"""Pacer of a pipeline: which measurements it waits for, and what it bounds."""

import pytest

from gllm.pacing.depth import LinkSeconds, Pace, PipelineSeconds
from gllm.pacing.pacer import (
    EARLY_FITS,
    MAX_PENDING_STEPS,
    PipelinePacer,
    StageTimeFits,
)
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import StepTime
from gllm.scheduler.stage_work import StageWork

STAGES, MAX_PREFILL = 3, 2560
SLOW = PipelineSeconds([], [LinkSeconds(0.03, 0.001)] * 2, [0.0, 0.03, 0.03], 0.03)
"""30 ms, and 1 ms per token."""


def make_pacer(lanes: str = "1") -> PipelinePacer:
    config = SchedulerConfig(lanes=lanes).resolve(STAGES, 1000, 1000, has_tcp_edges=True)
    assert config.max_num_batched_tokens == MAX_PREFILL
    return PipelinePacer(config)


def report(pacer: PipelinePacer, stages: int = STAGES, steps: int = EARLY_FITS[0]) -> None:
    """Report steps of four decodes that each took 11 ms."""
    for step in range(steps):
        pacer.on_scheduled(StageWork(step, 4, (), 4, 400, 4))
        for stage in range(stages):
            pacer.on_stage_times(stage, [StepTime(step, 0.0, 0.011)])


def test_all_stages_and_links_have_to_be_measured() -> None:
    pacer = make_pacer()
    assert pacer.pace == Pace(STAGES, MAX_PREFILL)
    report(pacer)
    assert not pacer.is_due(0.0)
    assert pacer.update(12, 1200, 0.0) is None
    pacer = make_pacer()
    pacer.on_paths(SLOW)
    report(pacer, stages=STAGES - 1)
    assert pacer.update(12, 1200, 0.0) is None
    pacer = make_pacer()
    pacer.on_paths(SLOW)
    report(pacer, steps=EARLY_FITS[0] - 1)
    assert pacer.update(12, 1200, 0.0) is None
    report(pacer)
    assert pacer.update(12, 1200, 0.0) is not None


def test_prefill_has_a_cap_with_one_lane_only() -> None:
    for lanes, cap in (("1", 32), ("2", MAX_PREFILL)):
        pacer = make_pacer(lanes)
        pacer.on_paths(SLOW)
        report(pacer)
        pace = pacer.update(12, 1200, 0.0)
        # Links carry 11 tokens in the time of a stage, fewer than the least chunk.
        assert pace is not None
        assert (pace.depth, pace.max_prefill_tokens) == (11, cap)


def test_the_load_is_a_mean_over_seconds() -> None:
    """A load of one moment does not move the depth; one that lasts does."""
    pacer = make_pacer()
    pacer.on_paths(PipelineSeconds([], [LinkSeconds(0.0, 0.001)] * 2, [0.0] * 3, 0.1))
    report(pacer)
    # Links are the slowest with 400 decodes, and stages with few.
    assert pacer.update(400, 40_000, 0.0) is not None
    small = pacer.pace.depth
    for now in range(6, 10):
        assert pacer.update(400, 40_000, float(now)) is None
    assert pacer.update(4, 400, 10.0) is None
    for now in range(11, 20):
        assert pacer.update(400, 40_000, float(now)) is None
    for now in range(20, 60):
        pacer.update(4, 400, float(now))
    assert pacer.pace.depth > 2 * small


def test_steps_that_no_stage_reports_are_forgotten() -> None:
    """The oldest first: reports of the others are still learned from."""
    fits = StageTimeFits(1)
    for step in range(3 * MAX_PENDING_STEPS):
        fits.on_scheduled(StageWork(step, 4, (), 4, 400, 4))
    num_forgotten = 2 * MAX_PENDING_STEPS
    fits.on_stage_times(0, [StepTime(step, 0.0, 1.0) for step in range(num_forgotten)])
    assert fits.read(100.0) is None
    kept = range(num_forgotten, num_forgotten + EARLY_FITS[0])
    fits.on_stage_times(0, [StepTime(step, 0.0, 1.0) for step in kept])
    assert fits.read(100.0) is not None


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_max_in_flight_bounds_the_first_depth(limit: int) -> None:
    config = SchedulerConfig(max_in_flight=limit).resolve(STAGES, 1000, 1000)
    assert PipelinePacer(config).pace.depth == limit
