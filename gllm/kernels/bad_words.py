"""Token sequences that an output may not contain, as tensors.

`masking.apply_bad_words` bans the last token of a sequence when the others end the output.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class BadWords:
    """Banned token sequences (phrases) of all requests in a batch. Tensors are [phrases] int64."""

    owners: Tensor
    """Index in `TokenHistories` of the sequence that each phrase applies to."""
    lengths: Tensor
    """Number of tokens before the last one."""
    before: Tensor
    """[phrases, longest] int64: tokens before the last one, right-aligned; padding is arbitrary."""
    last: Tensor
    """The token to ban."""
