"""Attention with linear biases: a penalty that grows with distance, instead of positions.

Owns the slopes. Does not know attention.

Source: Press, Smith and Lewis, "Train Short, Test Long" (2022), section 3; for numbers of
heads that are no power of two, the authors' code: the slopes of the next lower power of two, then
every other one of the next higher.
"""

import math

import torch
from torch import Tensor


def alibi_slopes(heads: int) -> Tensor:
    """The slope of each head, [heads] float32: what a distance of one token costs a score."""
    lower = 2 ** math.floor(math.log2(heads))
    slopes = _geometric(lower)
    if lower < heads:
        slopes = torch.cat((slopes, _geometric(2 * lower)[::2][: heads - lower]))
    return slopes


def _geometric(heads: int) -> Tensor:
    """For a power of two: 2^(-8/n), 2^(-16/n), ..."""
    return torch.pow(2.0, -8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float32))
