"""Averages of the load and step times of a pipeline, for policies that adapt to them."""

from collections import deque
from typing import NamedTuple

from gllm.scheduler.policy import SchedulerLoad
from gllm.scheduler.stage_work import StageWork
from gllm.scheduler.step_cost import MAX_PENDING_STEPS

DECAY_PER_STEP = 1 - 1 / 1024
"""Factor on a step's weight in the averages with each later step. Averages over fewer steps make
chunks grow and shrink with single prompts, which costs more than it gains."""
MAX_GAP_STEPS = 10
"""Longest time between two schedules that counts as time under load, in mean step times."""


class StepAverages(NamedTuple):
    """Averages per step of the load and of the time."""

    seconds: float
    """Interval of the step (gllm/scheduler/step_intervals.py)."""
    elapsed_seconds: float
    """Time since the step before, idle time of the pipeline excluded."""
    prefill_tokens: float
    prefill_steps: float
    """Share of the steps with prefill, 0..1."""
    prompts: float
    """Prompts whose prefill the step completes."""
    decodes: float
    """Tokens of decodes."""
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
        self._scheduled: deque[tuple[float | None, int, int]] = deque(maxlen=MAX_PENDING_STEPS)
        """Steps that are not observed yet: time under load since the schedule before, None
        if unknown, and the numbers of sequences that ran and waited."""
        self._last_schedule: float | None = None
        self._steps_since_prefill = stages
        self._running = self._waiting = 0

    def on_schedule(self, now: float) -> None:
        """Count the time since the last schedule, unless the pipeline was idle meanwhile."""
        elapsed = None
        if self._last_schedule is not None and self._weight:
            mean_seconds = self._sums[0] / self._weight
            elapsed = min(now - self._last_schedule, MAX_GAP_STEPS * mean_seconds)
        self._last_schedule = now
        self._scheduled.append((elapsed, self._running, self._waiting))

    def on_load(self, load: SchedulerLoad) -> None:
        """Store the numbers of sequences that run and that wait."""
        self._running, self._waiting = load.num_decoding, load.num_waiting_prompts

    def observe_step(self, work: StageWork, seconds: float) -> None:
        """Add a completed step and its interval."""
        decodes = work.num_decode_tokens if work.num_windows else work.num_decodes
        has_prefill = len(work.prefill_chunks) > work.num_windows
        self._steps_since_prefill = 0 if has_prefill else self._steps_since_prefill + 1
        # Of the step's own schedule, because stages report several steps at a time.
        elapsed, running, waiting = (
            self._scheduled.popleft() if self._scheduled else (None, self._running, self._waiting)
        )
        values = (
            seconds,
            seconds if elapsed is None else elapsed,
            work.num_tokens - decodes,
            has_prefill,
            max(0, work.num_sampled_rows - decodes),
            decodes,
            decodes if self._steps_since_prefill < self._stages else 0,
            work.num_prefill_pairs if has_prefill else 0.0,
            work.num_decode_context_tokens,
            running,
            waiting,
        )
        self._sums = [
            total * DECAY_PER_STEP + value for total, value in zip(self._sums, values, strict=True)
        ]
        self._weight = self._weight * DECAY_PER_STEP + 1
        self.num_steps += 1

    def read(self) -> StepAverages:
        """Return the averages of the observed steps, at least one."""
        return StepAverages(*[total / self._weight for total in self._sums])
