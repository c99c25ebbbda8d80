"""What a row of logits must not, may only and should rather bring.

Owns bans, allowed tokens and biases, each on one row. Does not know where the token ids come from.
"""

import math

from torch import Tensor


def keep_only(logits: Tensor, ids: Tensor) -> None:
    """Forbid all but some tokens, in place. logits [vocabulary] float32, ids [n] int64."""
    kept = logits[ids]
    logits.fill_(-math.inf)
    logits[ids] = kept


def ban(logits: Tensor, ids: Tensor) -> None:
    """Forbid tokens, in place. logits [vocabulary] float32, ids [n] int64."""
    logits[ids] = -math.inf


def add_bias(logits: Tensor, ids: Tensor, bias: Tensor) -> None:
    """Add to some logits, in place. logits [vocabulary] float32, ids [n] int64, each once, bias [n]
    float32."""
    logits[ids] += bias
