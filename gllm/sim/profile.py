"""A profile: how long the steps of a real pipeline took, kept in a file.

Owns the file's format and what is taken into it from a run. Knows nothing of fits: that is
costs/fitted.py.
"""

from pathlib import Path

import msgspec

from gllm.scheduler.config import SchedulerConfig
from gllm.sim.run import Run
from gllm.sim.step_costs import step_costs

FORMAT = 1


class StepSample(msgspec.Struct, frozen=True, array_like=True):
    """A step's work and seconds; fields as in scheduler.work.Work."""

    tokens: int
    pairs: float
    decodes: int
    decode_context: int
    samples: int
    stages: list[float]
    """Seconds of each stage."""


class Profile(msgspec.Struct, frozen=True):
    """What was measured, and on what."""

    model: str
    layers: list[int]
    """Of each stage."""
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
    format: int = FORMAT


def profile_of(run: Run, machine: dict[str, str]) -> Profile:
    """Take a run's measurements in; steps whose times are not all there are left out."""
    profile = Profile(
        run.start.model, run.start.layers, run.start.scheduler, machine, [], [], [], [], []
    )
    for costs in step_costs(run):
        work = costs.step.work
        waited = work.placeholders and costs.plan is None
        if waited:
            # The time between two steps was for sampling, which is no part of the stage's.
            (times,) = costs.step.stages
            assert times is not None
            computed = times.end - times.start
            profile.sampling.append(round(costs.stages[0] - computed, 7))
        seconds = [computed] if waited else costs.stages
        profile.steps.append(
            StepSample(
                *(work.tokens, work.pairs, work.decodes, work.decode_context, work.samples),
                [round(value, 7) for value in seconds],
            )
        )
        profile.returns.append((work.samples, round(costs.back, 7)))
        if costs.plan is not None:
            profile.plans.append(round(costs.plan, 7))
        waits = [wait for wait in costs.links if wait is not None]
        profile.links.extend((work.tokens, round(wait, 7)) for wait in waits)
    return profile


def write_profile(profile: Profile, path: str | Path) -> None:
    """Raises OSError as open does."""
    Path(path).write_bytes(msgspec.json.encode(profile))


def read_profile(path: str | Path) -> Profile:
    """Raises OSError, and ValueError for a file that is no profile."""
    try:
        profile = msgspec.json.decode(Path(path).read_bytes(), type=Profile)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no profile of `gllm profile`: {error}") from None
    if profile.format != FORMAT:
        raise ValueError(f"{path} has format {profile.format}, not {FORMAT}: make it anew")
    if not profile.steps:
        raise ValueError(f"{path} has no steps: make it anew with `gllm profile`")
    return profile
