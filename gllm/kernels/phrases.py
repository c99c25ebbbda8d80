"""Phrases that outputs may not contain, as tensors. masking.py bans their last tokens."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Phrases:
    """Sequences of tokens, of which the last one is forbidden where an output ends with the others.
    Tensors are [phrases] int64."""

    owners: Tensor
    """Which history each is for."""
    lengths: Tensor
    """Tokens before the last one."""
    before: Tensor
    """[phrases, longest] int64: those, at the end of each row; what is ahead of them is
    arbitrary."""
    last: Tensor
