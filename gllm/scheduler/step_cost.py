"""Linear model of a step's time, fitted while the pipeline runs.

The fit is a non-negative least squares over recent steps, in pure Python.

Source of the features: the simulator's cost models and Vidur (arXiv 2405.05465), which predict the
time of a step from its tokens, its prefill attention and its decode attention.
"""

from collections.abc import Container, Iterable
from operator import mul
from typing import NamedTuple

from gllm.scheduler.stage_work import StageWork, count_query_key_pairs

FEATURE_SCALES = (1.0, 1e3, 1e6, 1e2, 1e5)
"""Typical sizes of the features, which keep the equations well conditioned."""
DECAY_PER_STEP = 0.998
"""Factor on a step's weight with each later step: about the last thousand steps count."""
REFIT_INTERVAL_STEPS = 32
"""Observed steps between two fits."""
DESCENT_SWEEPS = 60
"""Passes of the coordinate descent over all coefficients per fit."""


class StepCostCoefficients(NamedTuple):
    """Seconds per unit of each feature; none is negative."""

    step: float = 0.0
    token: float = 1.0
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
    """Return the features of a step, in the order of StepCostCoefficients."""
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
    """Return the x >= 0 that minimises x'Ax / 2 - b'x, by coordinate descent.

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
    """Coefficients fitted to the observed steps, recent ones with more weight.

    early_fits: numbers of steps after which there is a fit before the first interval ends.
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
