"""Parameters that turn query-key products into attention scores; every backend reads them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionScaling:
    """Scale, softcap, ALiBi slopes and sinks of attention scores."""

    scale: float
    """Factor on the product of query and key, usually head_dim ** -0.5."""
    softcap: float | None = None
    """If set, a scaled score s becomes softcap * tanh(s / softcap)."""
    alibi_slopes: Tensor | None = None
    """[heads] float32: penalty on a score per token of distance (ALiBi)."""
    sinks: Tensor | None = None
    """[heads] float32: score of a further key, whose value is zero, in the softmax of a query."""
