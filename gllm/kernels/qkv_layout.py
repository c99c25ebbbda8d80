"""Layout of the fused query, key and value projection, and the norms applied to its heads.

`qkv.py` and `triton/qkv.py` read it.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class QKVLayout:
    """Head counts of a fused QKV projection, QK norm weights and the layout of rotary pairs."""

    num_heads: int
    num_kv_heads: int
    interleaved: bool = False
    """Rotary embedding pairs neighbouring elements instead of the two halves of a head."""
    query_norm: Tensor | None = None
    """[head_dim]: weight of the RMSNorm of each query head before the rotation."""
    key_norm: Tensor | None = None
    """[head_dim]: weight of the RMSNorm of each key head before the rotation."""
    eps: float = 0.0
    """Epsilon of both norms."""
