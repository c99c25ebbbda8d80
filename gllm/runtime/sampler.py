"""From logits to tokens, row by row responsible.

Owns what goes wrong in single rows: a row that cannot be sampled gets an error, the others their
tokens. The arithmetic is in gllm/kernels/sampling.py. Knows nothing of steps and sequences.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gllm.kernels.sampling import SamplingPlan, plan_sampling, sample
from gllm.messages import Sampling


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The sampling rows of a batch; lists are in their order."""

    owners: list[tuple[int, int]]
    """(sequence, epoch)."""
    specs: list[Sampling]
    indices: list[int]
    """Which token of its output each row draws, counted from 0."""
    plan: SamplingPlan
    banned: list[tuple[int, tuple[int, ...]]]
    """(row, token ids that it must not draw)."""


def plan_rows(
    owners: list[tuple[int, int]], specs: list[Sampling], indices: list[int]
) -> SampledRows:
    """Columns for the sampling rows of a batch."""
    plan = plan_sampling(
        temperature=np.array([spec.temperature for spec in specs], dtype=np.float32),
        top_k=np.array([spec.top_k for spec in specs], dtype=np.int64),
        top_p=np.array([spec.top_p for spec in specs], dtype=np.float32),
        min_p=np.array([spec.min_p for spec in specs], dtype=np.float32),
        seed=np.array([spec.seed for spec in specs], dtype=np.int64),
        choice=np.array([spec.choice for spec in specs], dtype=np.int64),
        index=np.array(indices, dtype=np.int64),
    )
    banned = [
        (row, spec.banned)
        for row, (spec, index) in enumerate(zip(specs, indices, strict=True))
        if spec.banned and index < spec.min_tokens
    ]
    return SampledRows(owners, specs, indices, plan, banned)


def draw(logits: Tensor, rows: SampledRows) -> tuple[list[int], list[str]]:
    """The token of each row and, where there is none, the error (else the empty string).

    logits [rows, vocabulary] float32 are overwritten.
    """
    if not rows.specs:
        return [], []
    try:
        return _draw_all(logits, rows)
    except Exception:
        return _draw_each(logits, rows)


def _draw_all(logits: Tensor, rows: SampledRows) -> tuple[list[int], list[str]]:
    lowest, highest = logits.aminmax(dim=-1)
    finite = (torch.isfinite(lowest) & torch.isfinite(highest)).tolist()
    errors = ["" if good else "the model computed logits that are not finite" for good in finite]
    for row, ids in rows.banned:
        known = [i for i in ids if 0 <= i < logits.shape[1]]
        logits[row, known] = -math.inf
        if len(set(known)) == logits.shape[1]:
            errors[row] = "every token of the vocabulary is banned"
    failed = [row for row, error in enumerate(errors) if error]
    if failed:
        logits[failed] = 0
    tokens = sample(logits, rows.plan).tolist()
    for row in failed:
        tokens[row] = 0
    return tokens, errors


def _draw_each(logits: Tensor, rows: SampledRows) -> tuple[list[int], list[str]]:
    """Row by row, so that an exception ends its own row only."""
    tokens, errors = [], []
    for row, (owner, spec, index) in enumerate(
        zip(rows.owners, rows.specs, rows.indices, strict=True)
    ):
        try:
            token, error = _draw_all(logits[row : row + 1], plan_rows([owner], [spec], [index]))
        except Exception as cause:
            token, error = [0], [f"sampling failed: {cause!r}"]
        tokens += token
        errors += error
    return tokens, errors
