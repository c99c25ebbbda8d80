"""Cost profile: step times of a real pipeline, stored in a file; costs/fitted.py fits them."""

from pathlib import Path

import msgspec

from gllm.scheduler.config import SchedulerConfig
from gllm.sim.metrics.run_record import RunRecord
from gllm.sim.metrics.step_costs import StepCosts, measure_step_costs

FORMAT_VERSION = 1


class StepSample(msgspec.Struct, frozen=True, array_like=True):
    """A step's work and seconds; fields as in scheduler.work.Work."""

    tokens: int
    chunks: int
    pairs: float
    decodes: int
    decode_context: int
    samples: int
    stages: list[float]
    """Seconds of each stage."""


class CostProfile(msgspec.Struct, frozen=True):
    """Measured step times of a pipeline, and the machine and configuration of the measurement."""

    model: str
    layers: list[int]
    """Number of layers of each stage."""
    scheduler: SchedulerConfig
    """Resolved; the policy under which it was measured."""
    machine: dict[str, str]
    """Device, threads, versions."""
    steps: list[StepSample]
    links: list[tuple[int, float]]
    """(tokens, seconds) from the end of a stage to the start of the next, where that was idle."""
    plans: list[float]
    """Seconds from the news that led to a plan to the first stage's start, where that was idle."""
    sampling: list[float]
    """Seconds from the stage's end to the next one's start where that waited for its tokens; one
    stage only."""
    returns: list[tuple[int, float]]
    """(samples, seconds) from the last stage's end to the commit."""
    degrees: list[int] = []
    """Number of tensor-parallel ranks of each stage; empty: one each."""
    format: int = FORMAT_VERSION


def build_profile(runs: list[RunRecord], machine: dict[str, str]) -> CostProfile:
    """Build a profile from runs of one pipeline; the configuration is the first run's."""
    start = runs[0].start
    profile = CostProfile(
        start.model,
        start.layers,
        start.scheduler,
        machine,
        [],
        [],
        [],
        [],
        [],
        degrees=start.degrees,
    )
    for run in runs:
        for costs in measure_step_costs(run):
            _take(profile, costs)
    return profile


def _take(profile: CostProfile, costs: StepCosts) -> None:
    work = costs.step.work
    stages = costs.stage_seconds
    if work.has_placeholders and costs.plan_seconds is None:
        # The time between two steps was for sampling, which is no part of the stage's.
        (times,) = costs.step.stage_times
        assert times is not None
        computed = times.end - times.start
        profile.sampling.append(round(stages[0] - computed, 7))
        stages = [computed]
    profile.steps.append(
        StepSample(
            work.num_tokens,
            len(work.prefill_chunks),
            work.num_query_key_pairs,
            work.num_decodes,
            work.num_decode_context_tokens,
            work.num_sampled_rows,
            [round(value, 7) for value in stages],
        )
    )
    profile.returns.append((work.num_sampled_rows, round(costs.return_seconds, 7)))
    if costs.plan_seconds is not None:
        profile.plans.append(round(costs.plan_seconds, 7))
    waits = [wait for wait in costs.link_seconds if wait is not None]
    profile.links.extend((work.num_tokens, round(wait, 7)) for wait in waits)


def write_profile(profile: CostProfile, path: str | Path) -> None:
    """Write a profile as JSON.

    Raises:
        OSError: The file cannot be written.
    """
    Path(path).write_bytes(msgspec.json.encode(profile))


def read_profile(path: str | Path) -> CostProfile:
    """Read a profile.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not a profile.
    """
    try:
        profile = msgspec.json.decode(Path(path).read_bytes(), type=CostProfile)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not a profile written by `gllm profile`: {error}") from None
    if profile.format != FORMAT_VERSION:
        raise ValueError(f"{path} has format {profile.format}, not {FORMAT_VERSION}: make it anew")
    if not profile.steps:
        raise ValueError(f"{path} has no steps: make it anew with `gllm profile`")
    return profile
