"""What a row of logits must not, may only and should rather bring.

Owns bans, allowed tokens and biases, each on one row. Does not know where the token ids come from;
they may be on the CPU where logits are on a GPU, and nobody waits for it.
"""

import math

import torch
from torch import Tensor

from gllm.kernels.transfer import beside


def keep_only(logits: Tensor, ids: Tensor) -> None:
    """Forbid all but some tokens, in place. logits [vocabulary] float32, ids [n] int64."""
    ids = beside(ids, logits)
    kept = logits[ids]
    logits.fill_(-math.inf)
    logits[ids] = kept


def keep_set(logits: Tensor, bits: Tensor) -> None:
    """Forbid tokens whose bit is not set, in place. logits [vocabulary] float32, bits
    [at least vocabulary / 8] uint8, lowest bit first."""
    ones = beside(torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8), logits)
    unset = (beside(bits, logits)[:, None] & ones) == 0
    logits.masked_fill_(unset.flatten()[: len(logits)], -math.inf)


def ban(logits: Tensor, ids: Tensor) -> None:
    """Forbid tokens, in place. logits [vocabulary] float32, ids [n] int64."""
    logits[beside(ids, logits)] = -math.inf


def add_bias(logits: Tensor, ids: Tensor, bias: Tensor) -> None:
    """Add to some logits, in place. logits [vocabulary] float32, ids [n] int64, each once, bias [n]
    float32."""
    logits[beside(ids, logits)] += beside(bias, logits)
