"""Sampling plan of a batch: greedy rows, and parameters and random numbers of the other rows.

`sampling.py` executes it on CPUs, `triton/sampling.py` on GPUs.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gllm.kernels.random_numbers import random_uniform

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

WHOLE_VOCABULARY, TOP_P_NUCLEUS = 0, -1
"""Values of RandomSamplingGroup.candidates: whole vocabulary without sorting; top-p alone."""
MIN_NORMAL_FLOAT32 = np.finfo(np.float32).tiny
"""Smallest normal float32. Smaller temperatures and top-p values are raised to it: they keep the
same tokens, and arithmetic that flushes denormals does not turn them into 0."""


@dataclass(frozen=True, slots=True)
class RandomSamplingGroup:
    """Rows of a batch that are sampled randomly by the same method, with their sampling parameters.

    Tensors have one entry per row of the group, int64 or float32.
    """

    rows: Tensor
    """Row of the logits of each entry."""
    candidates: int
    """Upper bound of top-k; WHOLE_VOCABULARY or TOP_P_NUCLEUS for rows without top-k."""
    temperature: Tensor
    top_k: Tensor
    """0 means off."""
    top_p: Tensor
    """Infinite means off."""
    min_p: Tensor
    number: Tensor
    """float64 in [0, 1): the uniform random number of each row."""

    def select(self, chosen: Tensor) -> "RandomSamplingGroup":
        """Return a group with only the rows selected by the mask `chosen` [rows] bool."""
        columns = (self.temperature, self.top_k, self.top_p, self.min_p, self.number)
        kept = (column[chosen] for column in columns)
        return RandomSamplingGroup(self.rows[chosen], self.candidates, *kept)


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Sampling parameters of a batch, grouped by method for CPUs and as one table for GPUs."""

    greedy: Tensor
    """[greedy rows] int64: rows that take the argmax."""
    random: list[RandomSamplingGroup]
    """Groups of the other rows."""
    settings: Tensor
    """[3, rows] float32, for a GPU: temperature, top-p (infinite means off), min-p."""
    counters: Tensor
    """[4, rows] int64, for a GPU: top-k (0 means off), seed, choice, index."""
    has_filters: bool
    """True if a row has top-k or top-p."""

    def for_gpu(self) -> "SamplingPlan":
        """Return a copy without the fields for CPUs, so that less is copied to the GPU."""
        return replace(self, greedy=self.greedy[:0], random=[])


def plan_sampling(
    temperature: Floats,
    top_k: Ints,
    top_p: Floats,
    min_p: Floats,
    seed: Ints,
    choice: Ints,
    index: Ints,
) -> SamplingPlan:
    """Collect the sampling parameters of a batch and group its rows by sampling method.

    All arguments have one entry per row, [rows].

    Args:
        temperature: 0 means greedy, regardless of the other arguments.
        top_k: 0 means off.
        top_p: 1 means off; a value that rounds to 0 keeps the likeliest token.
        min_p: 0 means off.
        seed: Seed of the request.
        choice: Index of the choice within its request.
        index: Index of the token in the output. seed, choice and index determine the random number.
    """
    top_p = np.maximum(top_p, MIN_NORMAL_FLOAT32)
    temperature = np.where(
        temperature > 0, np.maximum(temperature, MIN_NORMAL_FLOAT32), temperature
    )
    # Powers of two: few groups, and the group of a row does not depend on other rows.
    by_k = 2 ** np.ceil(np.log2(np.maximum(top_k, 1))).astype(np.int64)
    candidates = np.where(top_k > 0, by_k, np.where(top_p < 1, TOP_P_NUCLEUS, WHOLE_VOCABULARY))
    limit = np.where(top_p < 1, top_p, np.float32(np.inf))
    is_random = temperature > 0
    groups = []
    for count in np.unique(candidates[is_random]).tolist():
        rows = np.flatnonzero(is_random & (candidates == count))
        group = RandomSamplingGroup(
            rows=torch.from_numpy(rows),
            candidates=count,
            temperature=torch.from_numpy(temperature[rows]),
            top_k=torch.from_numpy(top_k[rows]),
            top_p=torch.from_numpy(limit[rows]),
            min_p=torch.from_numpy(min_p[rows]),
            number=random_uniform(
                *(torch.from_numpy(word[rows]) for word in (seed, choice, index))
            ),
        )
        groups.append(group)
    return SamplingPlan(
        torch.from_numpy(np.flatnonzero(~is_random)),
        groups,
        torch.from_numpy(np.stack((temperature, limit, min_p)).astype(np.float32, copy=False)),
        torch.from_numpy(np.stack((top_k, seed, choice, index))),
        any(group.candidates != WHOLE_VOCABULARY for group in groups),
    )
