"""Slopes of attention with linear biases (ALiBi).

Source: Press, Smith and Lewis, "Train Short, Test Long" (2022), section 3. For a number of heads
that is not a power of two, as in the authors' code: the slopes of the next lower power of two, then
every other slope of the next higher one.
"""

import math

import torch
from torch import Tensor


def compute_alibi_slopes(heads: int) -> Tensor:
    """Return the ALiBi slope of each attention head, [heads] float32.

    A head's score falls by its slope for each token of distance between query and key.
    """
    lower = 2 ** math.floor(math.log2(heads))
    slopes = _geometric(lower)
    if lower < heads:
        slopes = torch.cat((slopes, _geometric(2 * lower)[::2][: heads - lower]))
    return slopes


def _geometric(heads: int) -> Tensor:
    """Return 2^(-8/n), 2^(-16/n), ... for n heads, a power of two."""
    return torch.pow(2.0, -8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float32))
