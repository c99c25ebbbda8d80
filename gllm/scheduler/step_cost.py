"""A linear model of a step's time, fitted while the pipeline runs.

Owns the fit: non-negative least squares over recent steps, in pure Python. Knows nothing of what is
done with it.

Source of the features: simulator and Vidur's practice (arXiv 2405.05465) of telling a step's time
from its tokens, its prefill attention and its decode attention.
"""

from typing import NamedTuple

from gllm.scheduler.stage_work import StageWork, count_query_key_pairs

FEATURE_SCALES = (1.0, 1e3, 1e6, 1e2, 1e5)
"""Typical sizes of the features, so that the equations are well conditioned."""
DECAY_PER_STEP = 0.998
"""Weight that a step keeps with each later one: the last thousand or so count."""
REFIT_INTERVAL_STEPS = 32
DESCENT_SWEEPS = 60


class StepCostCoefficients(NamedTuple):
    """Seconds for one of each; none is negative."""

    step: float = 0.0
    token: float = 1.0
    pair: float = 0.0
    """A query-key pair of a prefill chunk."""
    decode: float = 0.0
    """A decode, on top of its token."""
    context: float = 0.0
    """A token that a decode attends to."""

    def seconds(self, work: StageWork) -> float:
        """A step's predicted time."""
        return sum(c * f for c, f in zip(self, step_features(work), strict=True))

    def chunk(self, start: int, tokens: int) -> float:
        """A prefill chunk's part of it."""
        return self.token * tokens + self.pair * count_query_key_pairs(start, tokens)


def step_features(work: StageWork) -> tuple[float, ...]:
    """What the coefficients multiply."""
    return (1.0, work.tokens, work.pairs, work.decodes, work.decode_context)


def solve_nonnegative(
    matrix: list[list[float]], right: list[float], start: list[float], sweeps: int = DESCENT_SWEEPS
) -> list[float]:
    """x >= 0 that minimises x'Ax / 2 - b'x, by coordinate descent.

    matrix: A, symmetric and positive semi-definite, [n][n]. right: b, [n]. start: where to begin.
    """
    x = list(start)
    for _ in range(sweeps):
        for i, row in enumerate(matrix):
            if row[i] > 0:
                rest = sum(a * value for a, value in zip(row, x, strict=True))
                x[i] = max(0.0, x[i] + (right[i] - rest) / row[i])
    return x


class OnlineStepCostFit:
    """Coefficients that follow the steps that were observed."""

    def __init__(self) -> None:
        self.fitted: StepCostCoefficients | None = None
        """None until there were steps enough."""
        size = len(FEATURE_SCALES)
        self._matrix = [[0.0] * size for _ in range(size)]
        self._right = [0.0] * size
        self._scaled = [0.0] * size
        self._seen = 0

    def observe(self, work: StageWork, seconds: float) -> None:
        """A step's work and how long the slowest stage took for it."""
        if seconds <= 0:
            return
        row = [f / s for f, s in zip(step_features(work), FEATURE_SCALES, strict=True)]
        # Errors count in relation to the step's length, or long steps alone would be fitted.
        weight = 1 / seconds**2
        for i, value in enumerate(row):
            line = self._matrix[i]
            for j, other in enumerate(row):
                line[j] = line[j] * DECAY_PER_STEP + weight * value * other
            self._right[i] = self._right[i] * DECAY_PER_STEP + weight * value * seconds
        self._seen += 1
        if self._seen % REFIT_INTERVAL_STEPS == 0:
            self._scaled = solve_nonnegative(self._matrix, self._right, self._scaled)
            self.fitted = StepCostCoefficients(
                *(x / s for x, s in zip(self._scaled, FEATURE_SCALES, strict=True))
            )
