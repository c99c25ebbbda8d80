"""Linear model of a step's time, fitted while the pipeline runs, and collector of step times.

The fit is a non-negative least squares over recent steps, in pure Python.

Source of the features: the simulator's cost models and Vidur (arXiv 2405.05465), which predict the
time of a step from its tokens, its prefill attention and its decode attention.
"""

from collections.abc import Callable, Container, Iterable
from operator import mul
from typing import NamedTuple

from gllm.scheduler.plan import StepPlan, StepTime
from gllm.scheduler.stage_work import StageWork, compute_stage_work, count_query_key_pairs

MAX_PENDING_STEPS = 4096
"""Steps kept while their stages do not report; the oldest is dropped first."""
REPORTED_STEP_INTERVAL = 7
"""Every seventh step counts for the reported cost of steps. The number has no common divisor with
usual numbers of stages, so that all kinds of alternating micro-batches are among them."""

FEATURE_SCALES = (1.0, 1e3, 1e6, 1e2, 1e5)
"""Typical sizes of the features, which keep the equations well conditioned."""
DECAY_PER_STEP = 0.998
"""Factor on a step's weight with each later step: about the last thousand steps count."""
REFIT_INTERVAL_STEPS = 32
"""Observed steps between two fits."""
DESCENT_SWEEPS = 60
"""Passes of the coordinate descent over all coefficients per fit."""


class StepCostCoefficients(NamedTuple):
    """Coefficients of a linear model that predicts a step's time in seconds; none is negative."""

    step: float = 0.0
    """Seconds per step."""
    token: float = 1.0
    """Seconds per token."""
    pair: float = 0.0
    """Per query-key pair of a prefill chunk."""
    decode: float = 0.0
    """Per decode, in addition to its token."""
    context_token: float = 0.0
    """Per token that a decode attends to."""

    def predict_seconds(self, work: StageWork) -> float:
        """Return the predicted time of a step."""
        return sum(c * f for c, f in zip(self, step_features(work), strict=True))

    def predict_prefill_seconds(self, lengths: Iterable[int]) -> float:
        """Return the predicted time of the prefills of sequences, with a step for each."""
        return sum(self.step + self.predict_chunk_seconds(0, length) for length in lengths)

    def predict_chunk_seconds(self, start: int, num_tokens: int) -> float:
        """Return the part of a step's time that a prefill chunk after `start` tokens causes."""
        return self.token * num_tokens + self.pair * count_query_key_pairs(start, num_tokens)


def step_features(work: StageWork) -> tuple[float, ...]:
    """Return the inputs of the linear step time model for one micro-batch.

    They are in the order of StepCostCoefficients: 1, tokens, query-key pairs, decodes, context
    tokens.
    """
    return (
        1.0,
        work.num_tokens,
        work.num_query_key_pairs,
        work.num_decodes,
        work.num_decode_context_tokens,
    )


def solve_nonnegative(
    matrix: list[list[float]],
    right: list[float],
    start: list[float],
    num_sweeps: int = DESCENT_SWEEPS,
) -> list[float]:
    """Return the vector x >= 0 that minimises x'Ax / 2 - b'x, by coordinate descent.

    Args:
        matrix: A, symmetric and positive semi-definite, [n][n].
        right: b, [n].
        start: initial x, [n].
        num_sweeps: passes over all coordinates.
    """
    x = list(start)
    for _ in range(num_sweeps):
        for i, row in enumerate(matrix):
            if row[i] > 0:
                product = sum(map(mul, row, x))
                x[i] = max(0.0, x[i] + (right[i] - product) / row[i])
    return x


class OnlineStepCostFit:
    """Fits the linear step time model to measured steps while the pipeline runs.

    Recent steps have more weight. A new fit is made after every REFIT_INTERVAL_STEPS steps.

    Args:
        early_fits: numbers of steps after which there are additional fits.
    """

    def __init__(self, early_fits: Container[int] = ()) -> None:
        self.coefficients: StepCostCoefficients | None = None
        """None until REFIT_INTERVAL_STEPS steps, or those of an early fit, have been observed."""
        self._early_fits = early_fits
        size = len(FEATURE_SCALES)
        self._matrix = [[0.0] * size for _ in range(size)]
        self._right = [0.0] * size
        self._scaled = [0.0] * size
        self._num_steps = 0

    def observe_step(self, work: StageWork, seconds: float) -> None:
        """Add a step: its work and the time of its slowest stage."""
        if seconds <= 0:
            return
        row = [f / s for f, s in zip(step_features(work), FEATURE_SCALES, strict=True)]
        # Relative errors: with absolute ones the long steps alone would determine the fit.
        weight = 1 / seconds**2
        for i, value in enumerate(row):
            line = self._matrix[i]
            for j, other in enumerate(row):
                line[j] = line[j] * DECAY_PER_STEP + weight * value * other
            self._right[i] = self._right[i] * DECAY_PER_STEP + weight * value * seconds
        self._num_steps += 1
        if self._num_steps % REFIT_INTERVAL_STEPS == 0 or self._num_steps in self._early_fits:
            self._scaled = solve_nonnegative(self._matrix, self._right, self._scaled)
            unscaled = [x / s for x, s in zip(self._scaled, FEATURE_SCALES, strict=True)]
            self.coefficients = StepCostCoefficients(*unscaled)


class StepTimeCollector:
    """Waits until all stages have reported a step's time, then calls `observe` with the longest.

    Args:
        observe: called with the work of each step and the time of its slowest stage; None to ignore
            all times.
        stages: number of pipeline stages.
    """

    def __init__(self, observe: Callable[[StageWork, float], None] | None, stages: int) -> None:
        self._observe = observe
        self._stages = stages
        self._pending: dict[int, tuple[StageWork, list[float]]] = {}

    def on_scheduled(self, plan: StepPlan) -> None:
        """Store the work of a step until all stages have reported its time."""
        if self._observe is None:
            return
        self._pending[plan.step] = compute_stage_work(plan.step, plan.rows), []
        if len(self._pending) > MAX_PENDING_STEPS:
            del self._pending[next(iter(self._pending))]

    def on_stage_time(self, time: StepTime) -> None:
        """Record a stage's report; the last one of a step completes the step."""
        if self._observe is None or time.step not in self._pending:
            return
        work, seconds = self._pending[time.step]
        seconds.append(time.end - time.start)
        if len(seconds) == self._stages:
            del self._pending[time.step]
            self._observe(work, max(seconds))


class StepCostMeter:
    """Fits the step time model to a sample of the steps, for latency predictions by routers.

    One step in REPORTED_STEP_INTERVAL is in the sample.
    """

    def __init__(self, stages: int) -> None:
        self._fit = OnlineStepCostFit()
        self._collector = StepTimeCollector(self._fit.observe_step, stages)
        self._reported: StepCostCoefficients | None = None

    def on_scheduled(self, plan: StepPlan) -> None:
        """Store the work of a step, if it is in the sample."""
        if plan.step % REPORTED_STEP_INTERVAL == 0:
            self._collector.on_scheduled(plan)

    def on_stage_times(self, times: list[StepTime]) -> StepCostCoefficients | None:
        """Add the times of a stage; return the coefficients if there is a new fit."""
        for time in times:
            if time.step % REPORTED_STEP_INTERVAL == 0:
                self._collector.on_stage_time(time)
        if self._fit.coefficients is self._reported:
            return None
        self._reported = self._fit.coefficients
        return self._reported
