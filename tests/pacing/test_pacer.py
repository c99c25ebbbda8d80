"""Pacer of a pipeline: which measurements it waits for, and what it bounds."""

from math import inf

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


def report_mixed(pacer: PipelinePacer, steps: range, tokens: int, decodes: int = 4) -> None:
    """Report steps of decodes and about so many prefill tokens; the last stage is slower."""
    for step in steps:
        num_prefill = tokens * (5 + step % 5) // 7
        chunks = ((0, num_prefill),) if num_prefill else ()
        num_tokens = decodes + num_prefill
        pacer.on_scheduled(StageWork(step, num_tokens, chunks, decodes, 100 * decodes, 4))
        for stage in range(STAGES):
            seconds = (0.010 + 0.004 * (stage == STAGES - 1)) + 1e-4 * num_tokens
            pacer.on_stage_times(stage, [StepTime(step, 0.0, seconds)])


def paths(seconds_per_token: float, max_seconds_per_token: float | None = None) -> PipelineSeconds:
    most = seconds_per_token if max_seconds_per_token is None else max_seconds_per_token
    link = LinkSeconds(0.0, seconds_per_token, most)
    return PipelineSeconds([], [link] * (STAGES - 1), [0.0] * STAGES, 0.0)


@pytest.mark.parametrize(("tokens", "depth"), [(0, 2), (140, 3)])
def test_prefill_beside_decodes_keeps_all_stages_busy(tokens: int, depth: int) -> None:
    """Two micro-batches suffice for decodes alone, because the last stage is slower."""
    pacer = make_pacer()
    pacer.on_paths(paths(1e-6))
    report_mixed(pacer, range(EARLY_FITS[1]), tokens)
    pacer.update(12, 1200, 0.0)
    assert pacer.pace.depth == depth


def test_micro_batches_are_mixed_over_fast_links() -> None:
    """144 tokens take 28 ms on a stage: mixed below 14 ms on a link, separated above 28."""
    pacer = make_pacer("2")
    pacer.on_paths(paths(0.0, inf))
    report_mixed(pacer, range(EARLY_FITS[1]), 140)
    pacer.update(12, 1200, 0.0)
    assert not pacer.pace.is_mixed, "nothing is known about the rate of the links"
    now, step = 0.0, EARLY_FITS[1]
    for per_token, is_mixed in (
        (1.2e-4, False),
        (0.8e-4, True),
        (1.4e-4, True),
        (2.3e-4, False),
        (1.4e-4, False),
    ):
        pacer.on_paths(paths(per_token))
        # Five seconds between two changes.
        for _ in range(6):
            now, step = now + 1.0, step + 8
            report_mixed(pacer, range(step - 8, step), 140)
            pacer.update(12, 1200, now)
        assert pacer.pace.is_mixed == is_mixed, per_token


def test_phases_stay_pure_where_that_is_configured() -> None:
    config = SchedulerConfig(lanes="2", phase_pure=True).resolve(STAGES, 1000, 1000, True)
    pacer = PipelinePacer(config)
    pacer.on_paths(paths(1e-6))
    report_mixed(pacer, range(EARLY_FITS[1]), 140)
    pacer.update(12, 1200, 0.0)
    assert not pacer.pace.is_mixed


def test_separate_prefill_is_never_too_shallow() -> None:
    """Two suffice for decodes. A chunk takes 2 x 280 ms on links and 3 x 150 on stages: 4."""
    for tokens, depth in ((0, 2), (1400, 4)):
        pacer = make_pacer("2")
        pacer.on_paths(paths(2e-4))
        for step in range(EARLY_FITS[1] // 2):
            report_mixed(pacer, range(2 * step, 2 * step + 1), 0)
            report_mixed(pacer, range(2 * step + 1, 2 * step + 2), tokens, 0 if tokens else 4)
        pacer.update(12, 1200, 0.0)
        assert (pacer.pace.depth, pacer.pace.is_mixed) == (depth, False)
