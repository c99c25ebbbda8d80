"""Layout of fused projections of queries, keys and values, and the norms of their heads.

qkv.py and triton/qkv.py read it.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """How fused projections are cut, and what is done to their heads."""

    heads: int
    kv_heads: int
    interleaved: bool = False
    query_norm: Tensor | None = None
    """[head_dim]: scale of an RMSNorm before the rotation."""
    key_norm: Tensor | None = None
    eps: float = 0.0
