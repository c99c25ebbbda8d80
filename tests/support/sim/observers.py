"""Observers of simulated pipelines for tests."""

from collections import Counter

from gllm.scheduler.plan import StepOutput, StepPlan
from gllm.sim.observer import PipelineObserver


class CommitTimes(PipelineObserver):
    """Times of all commits in seconds."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_committed(self, plan: StepPlan, output: StepOutput, now: float) -> None:
        """Keep the time."""
        self.times.append(now)


class RecordedStages(PipelineObserver):
    """Begin and end of each step on each stage in seconds, in the order of the ends."""

    def __init__(self) -> None:
        self.times: dict[tuple[int, int], tuple[float, float]] = {}
        """By stage and step."""

    def on_stage_finished(self, stage: int, step: int, start: float, end: float) -> None:
        """Keep the times; a step ends once."""
        assert (stage, step) not in self.times
        self.times[stage, step] = start, end


class TokenCounts(PipelineObserver):
    """Number of generated tokens of each sequence."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def on_committed(self, plan: StepPlan, output: StepOutput, now: float) -> None:
        """Count the tokens of a step."""
        self.counts.update(output.seqs)
