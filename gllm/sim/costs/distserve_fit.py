"""Fit of DistServe's coefficients to measured batches.

Source: "DistServe" (OSDI'24, arXiv 2401.09670), Appendix A; its artifact takes the least squares of
the relative error.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gllm.sim.costs.distserve import PhaseCoefficients


class PrefillSample(NamedTuple):
    """A measured prefill."""

    lengths: Sequence[int]
    """Tokens of each prompt."""
    milliseconds: float


class DecodeSample(NamedTuple):
    """A measured decode step."""

    contexts: Sequence[int]
    """Context tokens of each request."""
    milliseconds: float


def fit_prefill(samples: Sequence[PrefillSample]) -> PhaseCoefficients:
    """Return the coefficients of a constant, the tokens, and their squares.

    Raises:
        ValueError: The samples do not determine them, or a time is not above 0.
    """
    return _fit(
        [(1.0, sum(sample.lengths), sum(n * n for n in sample.lengths)) for sample in samples],
        [sample.milliseconds for sample in samples],
    )


def fit_decode(samples: Sequence[DecodeSample]) -> PhaseCoefficients:
    """Return the coefficients of a constant, the context tokens, and the requests.

    Raises:
        ValueError: The samples do not determine them, or a time is not above 0.
    """
    return _fit(
        [(1.0, sum(sample.contexts), len(sample.contexts)) for sample in samples],
        [sample.milliseconds for sample in samples],
    )


def _fit(rows: Sequence[tuple[float, float, float]], times: Sequence[float]) -> PhaseCoefficients:
    """Return the least-squares solution of the relative errors."""
    if not times or min(times) <= 0:
        raise ValueError("every sample needs a time above 0 milliseconds")
    matrix = np.array(rows, dtype=float) / np.array(times)[:, None]
    # Columns of one size, because squares of lengths are a million times the constant.
    sizes = np.linalg.norm(matrix, axis=0)
    solution, _, rank, _ = np.linalg.lstsq(matrix / sizes, np.ones(len(times)), rcond=None)
    if rank < matrix.shape[1]:
        raise ValueError(
            f"{len(times)} samples do not determine three coefficients: measure other batches"
        )
    return PhaseCoefficients(*(float(value) for value in solution / sizes))
