"""The gated activation of the feed-forward block.

Owns the formula. Does not know the projections around it.
"""

from torch import Tensor
from torch.nn import functional


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [tokens, 2 * n], gate in the first half; the result [tokens, n].

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), SwiGLU in equation 5.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
