"""A step's time from a profile: a curve over tokens, and attention on top.

Owns the fit of `gllm profile`'s measurements. Knows nothing of how they were taken.

A stage takes, in seconds,
    curve(tokens) + b chunks + c pairs + d decodes + e decode context + f samples:
the linear model of "Vidur" (arXiv 2405.05465) and others, with a rising piecewise linear curve for
its tokens, because small micro-batches read the weights and large ones compute. No coefficient is
negative, so nothing gets faster by more work, beyond the measured range neither.
"""

from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

from gllm.scheduler.stage_work import StageWork
from gllm.scheduler.step_cost import solve_nonnegative
from gllm.sim.costs.base import BaseCostModel, CostModel, DelegatingCostModel, TransferCost
from gllm.sim.costs.profile import CostProfile, StepSample

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Tokens at which the curve may bend; the last piece has no end."""
ROUNDS = 6
SWEEPS = 3000

Array = NDArray[np.float64]


def fit_nonnegative(features: Array, seconds: Array) -> list[float]:
    """Coefficients >= 0 that tell `seconds` [rows] from `features` [rows, columns].

    Errors count in relation to what is predicted, so that their sum comes out near zero for short
    steps and long ones alike; relations to what was measured would favour the fast ones.
    """
    scale = np.maximum(features.max(axis=0), 1e-12)
    scaled = features / scale
    guess = np.full_like(seconds, seconds.mean())
    solution = [0.0] * features.shape[1]
    for _ in range(ROUNDS):
        weighted = scaled / guess[:, None]
        matrix = (weighted.T @ weighted).tolist()
        right = (weighted.T @ (seconds / guess)).tolist()
        solution = solve_nonnegative(matrix, right, solution, SWEEPS // ROUNDS)
        guess = np.maximum(scaled @ np.array(solution), seconds.min() / 10)
    return (np.array(solution) / scale).tolist()


def _pieces(tokens: int) -> list[float]:
    """Return the length of each piece of the curve below `tokens`, in tokens."""
    ends = [*KNOTS[1:], tokens]
    return [float(max(0, min(tokens, end) - begin)) for begin, end in zip(KNOTS, ends, strict=True)]


def _features(sample: StepSample) -> list[float]:
    attention = [sample.chunks, sample.pairs, sample.decodes, sample.decode_context]
    return [1.0, *_pieces(sample.tokens), *attention, sample.samples]


class _StageFit:
    """One stage's coefficients."""

    def __init__(self, samples: Sequence[StepSample], stage: int) -> None:
        rows = np.array([_features(sample) for sample in samples])
        seconds = np.array([max(sample.stages[stage], 1e-7) for sample in samples])
        fitted = fit_nonnegative(rows, seconds)
        self._curve = fitted[: len(KNOTS) + 1]
        self._others = fitted[len(KNOTS) + 1 :]
        self._known: dict[int, float] = {}

    def seconds(self, work: StageWork) -> float:
        if work.num_tokens not in self._known:
            pieces = [1.0, *_pieces(work.num_tokens)]
            self._known[work.num_tokens] = sum(
                a * b for a, b in zip(self._curve, pieces, strict=True)
            )
        chunk, pair, decode, context, sample = self._others
        return (
            self._known[work.num_tokens]
            + chunk * len(work.prefill_chunks)
            + pair * work.num_query_key_pairs
            + decode * work.num_decodes
            + context * work.num_decode_context_tokens
            + sample * work.num_sampled_rows
        )


class FittedCostModel(BaseCostModel):
    """The pipeline of a profile."""

    def __init__(self, profile: CostProfile) -> None:
        self._stages = [_StageFit(profile.steps, stage) for stage in range(len(profile.layers))]
        self._link = _line(profile.links)
        self._plan = median(profile.plans) if profile.plans else 0.0
        self._sampling = median(profile.sampling) if profile.sampling else 0.0
        self._return = _line(profile.returns)

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """As fitted."""
        return self._stages[stage].seconds(work)

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return a fixed latency plus a time per token; all links are equal."""
        return TransferCost(self._link[1] * work.num_tokens, self._link[0])

    def plan_seconds(self, work: StageWork) -> float:
        """Return the measured median."""
        return self._plan

    def sample_seconds(self, work: StageWork) -> float:
        """Return the measured median."""
        return self._sampling

    def return_seconds(self, work: StageWork) -> float:
        """Return a constant plus a time per sampled token."""
        return self._return[0] + self._return[1] * work.num_sampled_rows


class ScaledCostModel(DelegatingCostModel):
    """The pipeline of another cost on a machine whose stages are slower by a factor."""

    def __init__(self, cost: CostModel, factor: float) -> None:
        super().__init__(cost)
        self._factor = factor

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time of the other model, multiplied by the factor."""
        return self._factor * super().stage_seconds(stage, work, now)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(seconds at zero, seconds for one more), neither negative; zeros of no points."""
    if not points:
        return 0.0, 0.0
    rows = np.array([[1.0, count] for count, _ in points])
    seconds = np.array([max(value, 1e-7) for _, value in points])
    constant, slope = fit_nonnegative(rows, seconds)
    return constant, slope
