"""The formula of attention scores, which every attention backend reads."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores come from queries and keys."""

    scale: float
    softcap: float | None = None
    """A scaled score s becomes softcap * tanh(s / softcap)."""
    slopes: Tensor | None = None
    """[heads] float32: what each token of distance takes off a score (ALiBi)."""
