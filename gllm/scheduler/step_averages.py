"""Averages of the load and step times of a pipeline, for policies that adapt to them."""

from typing import NamedTuple

from gllm.scheduler.policy import SchedulerLoad
from gllm.scheduler.stage_work import StageWork

DECAY_PER_STEP = 1 - 1 / 1024
"""Factor on a step's weight in the averages with each later step. Averages over fewer steps make
chunks grow and shrink with single prompts, which costs more than it gains."""
MAX_GAP_STEPS = 10
"""Longest time between two schedules that counts as time under load, in mean step times."""


class StepAverages(NamedTuple):
    """Averages per step of the load and of the time."""

    seconds: float
    """Time on the slowest stage."""
    elapsed_seconds: float
    """Time since the step before, idle time of the pipeline excluded."""
    prefill_tokens: float
    prompts: float
    """Prompts whose prefill the step completes."""
    decodes: float
    delayed_decodes: float
    """Decodes of steps with prefill, or so shortly after one that a stage still computes it."""
    pairs: float
    """Query-key pairs of prefill chunks."""
    context_tokens: float
    """Tokens that decodes attend to."""
    running: float
    """Sequences in decode, those of other steps included."""
    waiting: float
    """Prompts that wait or are half prefilled."""


class StepAverager:
    """Averages the load and the time of recent steps.

    Args:
        stages: number of pipeline stages.
    """

    def __init__(self, stages: int) -> None:
        self.num_steps = 0
        """Number of observed steps."""
        self._stages = stages
        self._sums = [0.0] * len(StepAverages._fields)
        self._weight = 0.0
        self._elapsed = 0.0
        """Time under load since the last observed step."""
        self._last_schedule: float | None = None
        self._steps_since_prefill = stages
        self._running = self._waiting = 0

    def on_schedule(self, now: float) -> None:
        """Count the time since the last schedule, unless the pipeline was idle meanwhile."""
        if self._last_schedule is not None and self._weight:
            mean_seconds = self._sums[0] / self._weight
            self._elapsed += min(now - self._last_schedule, MAX_GAP_STEPS * mean_seconds)
        self._last_schedule = now

    def on_load(self, load: SchedulerLoad) -> None:
        """Store the numbers of sequences that run and that wait."""
        self._running, self._waiting = load.num_decoding, load.num_waiting_prompts

    def observe_step(self, work: StageWork, seconds: float) -> None:
        """Add a completed step and the time of its slowest stage."""
        decodes = work.num_decodes
        self._steps_since_prefill = 0 if work.prefill_chunks else self._steps_since_prefill + 1
        values = (
            seconds,
            self._elapsed or seconds,
            work.num_tokens - decodes,
            max(0, work.num_sampled_rows - decodes),
            decodes,
            decodes if self._steps_since_prefill < self._stages else 0,
            work.num_query_key_pairs if work.prefill_chunks else 0.0,
            work.num_decode_context_tokens,
            self._running,
            self._waiting,
        )
        self._elapsed = 0.0
        self._sums = [
            total * DECAY_PER_STEP + value for total, value in zip(self._sums, values, strict=True)
        ]
        self._weight = self._weight * DECAY_PER_STEP + 1
        self.num_steps += 1

    def read(self) -> StepAverages:
        """Return the averages of the observed steps, at least one."""
        return StepAverages(*[total / self._weight for total in self._sums])
