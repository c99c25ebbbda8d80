"""Linear model of a step's time, fitted while the pipeline runs, and collector of step times.

The fit is a non-negative least squares over recent steps, in pure Python.

Source of the features: the simulator's cost models and Vidur (arXiv 2405.05465), which predict the
time of a step from its tokens, its prefill attention and its decode attention.
"""

import math
from collections.abc import Callable, Container, Iterable, Sequence
from operator import mul
from typing import NamedTuple

from gllm.scheduler.plan import StepPlan, StepTime
from gllm.scheduler.stage_work import StageWork, compute_stage_work, count_query_key_pairs

DEFAULT_RIDGE_TOKENS = 150
"""Ridge of the step time curve until it is fitted: that of a GPU."""
MAX_PENDING_STEPS = 4096
"""Steps kept while their stages do not report; the oldest is dropped first."""
REPORTED_STEP_INTERVAL = 7
"""Every seventh step counts for the reported cost of steps. The number has no common divisor with
usual numbers of stages, so that all kinds of alternating micro-batches are among them."""

FEATURE_SCALES = (1.0, 1e3, 1e6, 1e2, 1e5)
"""Typical sizes of the features, which keep the equations well conditioned."""
CURVE_SCALES = (1.0, 1e2, 1e4, 1e6, 1e5)
"""Typical sizes of the features of StepTimeCurve."""
DECAY_PER_STEP = 0.998
"""Factor on a step's weight with each later step: about the last thousand steps count."""
REFIT_INTERVAL_STEPS = 32
"""Observed steps between two fits."""
PRIOR_STEPS = 1
"""Samples without tokens, of the time that the given ridge predicts, at the first fit of a
StepTimeCurve: steps of a full pipeline are all large, and the first ones slow, so that they do not
determine the part of the time that does not depend on the tokens."""
MAX_WINDOW_STEPS = 64
"""Consecutive steps with windows of speculation that a StepTimeCurve leaves out."""
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


class DecayedLeastSquares:
    """Non-negative least squares of relative errors, in which recent samples count more.

    A sample that is far too large, such as a step beside a busy process, has less weight than the
    others, because its error is relative to its own size.

    Args:
        scales: typical sizes of the features, which keep the equations well conditioned.
    """

    def __init__(self, scales: Sequence[float]) -> None:
        size = len(scales)
        self._scales = scales
        self._matrix = [[0.0] * size for _ in range(size)]
        self._right = [0.0] * size
        self._scaled = [0.0] * size

    def observe(self, features: Iterable[float], target: float, weight: float = 1.0) -> None:
        """Add a sample, which counts as `weight` samples; its target is above 0."""
        # Relative errors: with absolute ones the long steps alone would determine the fit.
        row = [f / (s * target) for f, s in zip(features, self._scales, strict=True)]
        right = self._right
        for i, value in enumerate(row):
            line, weighted = self._matrix[i], weight * value
            for j, other in enumerate(row):
                line[j] = line[j] * DECAY_PER_STEP + weighted * other
            right[i] = right[i] * DECAY_PER_STEP + weighted

    def solve(self, start: Iterable[float] | None = None) -> list[float]:
        """Return the coefficients of the features, none of them negative.

        Args:
            start: coefficients that the search starts from and stays near where samples that are
                all alike do not determine the others; None for the last solution.
        """
        if start is not None:
            self._scaled = [x * s for x, s in zip(start, self._scales, strict=True)]
        self._scaled = solve_nonnegative(self._matrix, self._right, self._scaled)
        return [x / s for x, s in zip(self._scaled, self._scales, strict=True)]


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
        self._squares = DecayedLeastSquares(FEATURE_SCALES)
        self._num_steps = 0

    def observe_step(self, work: StageWork, seconds: float) -> None:
        """Add a step: its work and the time of its slowest stage."""
        if seconds <= 0:
            return
        self._squares.observe(step_features(work), seconds)
        self._num_steps += 1
        if self._num_steps % REFIT_INTERVAL_STEPS == 0 or self._num_steps in self._early_fits:
            self.coefficients = StepCostCoefficients(*self._squares.solve())


class StepTimeCurve(NamedTuple):
    """Step time by tokens as the root of a quadratic polynomial; no coefficient is negative.

    sqrt(constant + square * n ** 2) is the rounded roofline hypot(n, ridge) and
    sqrt(constant) + sqrt(square) * n, whose square has all three terms, the straight line of a
    device that reads weights and computes one after the other. The unit is the squared second.
    """

    constant: float
    linear: float
    square: float
    pair: float = 0.0
    """Per query-key pair of prefill chunks."""
    context_token: float = 0.0
    """Per token that a decode attends to."""

    @classmethod
    def from_ridge(cls, ridge_tokens: float, seconds: float = 1.0) -> "StepTimeCurve":
        """Return a rounded roofline with that ridge, of `seconds` for a step without tokens."""
        return cls(seconds**2, 0.0, (seconds / ridge_tokens) ** 2)

    def seconds(self, num_tokens: float, num_pairs: float = 0.0, num_context: float = 0.0) -> float:
        """Return the predicted time of a step with that many tokens, pairs and context tokens."""
        return math.sqrt(
            self.constant
            + num_tokens * (self.linear + num_tokens * self.square)
            + num_pairs * self.pair
            + num_context * self.context_token
        )

    def with_context(self, num_context: float) -> "StepTimeCurve":
        """Return the curve of steps whose decodes attend to that many tokens together."""
        return self._replace(constant=self.constant + num_context * self.context_token)

    def scaled(self, factor: float) -> "StepTimeCurve":
        """Return the curve of steps that take `factor` times as long."""
        return StepTimeCurve(*(factor**2 * coefficient for coefficient in self))

    def tokens_at_efficiency(self, efficiency: float) -> float:
        """Return the tokens of a step of which that share of the time is arithmetic, 0..1.

        It is infinite if the time of a step does not grow in proportion to its tokens.
        """
        # square * n ** 2 * excess = constant + linear * n
        excess = self.square * (efficiency**-2 - 1)
        if not excess:
            return math.inf
        half = self.linear / (2 * excess)
        return half + math.sqrt(half**2 + self.constant / excess)


class OnlineStepCurveFit:
    """Fits the step time curve to measured steps while the pipeline runs.

    Args:
        ridge_tokens: ridge of the curve before the first fit, and while all steps are alike.
        is_fixed: keep this ridge and fit the scale of the time only.
    """

    def __init__(self, ridge_tokens: float, is_fixed: bool = False) -> None:
        self.curve = StepTimeCurve.from_ridge(ridge_tokens)
        self.is_fitted = False
        """True once the curve is in seconds."""
        self.most_tokens = math.inf
        """Tokens of the largest steps of late, beyond which the curve is not known; no limit before
        the first fit and with a given ridge."""
        self._ridge_tokens = ridge_tokens
        self._is_fixed = is_fixed
        self._scale = DecayedLeastSquares((1.0,))
        """Fits the curve with the given ridge."""
        self._squares = DecayedLeastSquares(CURVE_SCALES)
        self._largest_step = 0.0
        self._num_steps = 0
        self._num_window_steps = 0
        """Latest steps that all had windows."""

    def observe_step(self, work: StageWork, seconds: float) -> None:
        """Add a step: its work and its interval, above 0.

        Steps with windows of speculation count only while there are no others: their time has a
        fit of its own, and without them the curve is that of the same pipeline without speculation.
        """
        self._num_window_steps = self._num_window_steps + 1 if work.num_windows else 0
        if self.is_fitted and 0 < self._num_window_steps <= MAX_WINDOW_STEPS:
            return
        tokens, square = work.num_tokens, seconds**2
        self._scale.observe((1 + (tokens / self._ridge_tokens) ** 2,), square)
        if not self._is_fixed:
            pairs = work.num_query_key_pairs if work.prefill_chunks else 0.0
            context = work.num_decode_context_tokens
            self._squares.observe((1.0, tokens, tokens**2, pairs, context), square)
            self._largest_step = max(tokens, self._largest_step * DECAY_PER_STEP)
        self._num_steps += 1
        if self._num_steps % REFIT_INTERVAL_STEPS == 0:
            self._refit()

    def _refit(self) -> None:
        (scale,) = self._scale.solve()
        self.curve = StepTimeCurve.from_ridge(self._ridge_tokens, math.sqrt(scale))
        if not self._is_fixed:
            start = None
            if not self.is_fitted:
                start = self.curve
                self._squares.observe((1.0, 0.0, 0.0, 0.0, 0.0), start.constant, PRIOR_STEPS)
            self.curve = StepTimeCurve(*self._squares.solve(start))
            self.most_tokens = self._largest_step
        self.is_fitted = True


def observe_both(
    observe: Callable[[StageWork, float], None] | None,
    further: Callable[[StageWork, float], None],
) -> Callable[[StageWork, float], None]:
    """Return a function that passes a step's work and interval, if it is above 0, to both."""

    def pass_on(work: StageWork, seconds: float) -> None:
        if observe is not None:
            observe(work, seconds)
        if seconds > 0:
            further(work, seconds)

    return pass_on


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
