"""Linear latency model of a worker, fitted to a cost model or to measured steps.

Source: "Aladdin" (arXiv 2405.06856): prefill k1 sum(l_in) + c1, decode k2 context + c2 b + c3, each
fitted by least squares with coefficients that are not negative.
"""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gllm.plan.engine_times import decode_step_work, prefill_work
from gllm.routing.placement import LatencyModel
from gllm.sim.costs.base import CostModel

Array = NDArray[np.float64]

PREFILL_TOKENS = (512, 768, 1024, 1536, 2048, 2560, 3072, 4096)
"""Prompt tokens of the steps to which a prefill is fitted; below, time does not follow tokens."""
DECODE_BATCHES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
DECODE_CONTEXTS = (128, 256, 512, 1024, 1536, 2048)
"""Tokens of context per request."""


class FittedLatency(NamedTuple):
    """A linear model of prefill and decode step times, with its relative errors (0..1)."""

    model: LatencyModel
    prefill_mean_error: float
    prefill_max_error: float
    decode_mean_error: float
    decode_max_error: float


def fit_latency(cost: CostModel, longest_prompt: int = PREFILL_TOKENS[-1]) -> FittedLatency:
    """Fit linear functions of tokens and batch size to a cost model's prefill and decode times.

    Args:
        cost: Cost model of an engine with one pipeline stage.
        longest_prompt: Prompt tokens up to which the fit holds.
    """
    lengths = [*PREFILL_TOKENS]
    while lengths[-1] < longest_prompt:
        lengths.append(min(2 * lengths[-1], longest_prompt))
    prefills = [(tokens, cost.stage_seconds(0, prefill_work([tokens]))) for tokens in lengths]
    decodes = [
        (batch, batch * context, cost.stage_seconds(0, decode_step_work(batch, context)))
        for batch in DECODE_BATCHES
        for context in DECODE_CONTEXTS
    ]
    return fit_steps(prefills, decodes)


def fit_steps(
    prefills: Sequence[tuple[int, float]], decodes: Sequence[tuple[int, int, float]]
) -> FittedLatency:
    """Fit the linear latency model to measured or predicted step times.

    Prefill seconds are linear in prompt tokens; decode seconds in batch size and total context.

    Args:
        prefills: (prompt tokens, seconds) of steps with prefills only.
        decodes: (requests, sum of their contexts in tokens, seconds) of steps with decodes only.
    """
    tokens, prefill_seconds = _columns(prefills)
    features = np.stack([tokens, np.ones_like(tokens)], axis=1)
    k1, c1 = solve_nonnegative_least_squares(features, prefill_seconds)
    batches, contexts, decode_seconds = _columns(decodes)
    ones = np.ones_like(batches)
    decode_features = np.stack([contexts, batches, ones], axis=1)
    k2, c2, c3 = solve_nonnegative_least_squares(decode_features, decode_seconds)
    prefill_errors = np.abs(features @ np.array([k1, c1]) / prefill_seconds - 1)
    decode_errors = np.abs(decode_features @ np.array([k2, c2, c3]) / decode_seconds - 1)
    return FittedLatency(
        LatencyModel(k1, c1, k2, c2, c3),
        float(prefill_errors.mean()),
        float(prefill_errors.max()),
        float(decode_errors.mean()),
        float(decode_errors.max()),
    )


def solve_nonnegative_least_squares(features: Array, values: Array) -> list[float]:
    """Return nonnegative coefficients of a linear function with the least squared relative errors.

    Args:
        features: Inputs, [rows, columns].
        values: Values to approximate, [rows].

    Raises:
        ModuleNotFoundError: scipy is missing; the message says what to install.
    """
    scale = np.maximum(features.max(axis=0), 1e-12)
    weighted = features / scale / values[:, None]
    solution, _ = import_optimize().nnls(weighted, np.ones_like(values))
    coefficients: list[float] = (solution / scale).tolist()
    return coefficients


def _columns(rows: Sequence[tuple[float, ...]]) -> list[Array]:
    return [np.array(column, np.float64) for column in zip(*rows, strict=True)]


def import_optimize() -> Any:
    """Import scipy.optimize. Raises ModuleNotFoundError that names the package to install."""
    try:
        return importlib.import_module("scipy.optimize")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "planning the number of engines needs scipy: pip install '.[plan]' in gllm's checkout",
            name=error.name,
        ) from error
