"""Token sequences that an output may not contain, as tensors.

`masking.apply_bad_words` bans the last token of a sequence when the others end the output.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class BadWords:
    """Forbidden token sequences (phrases) of a batch; tensors are [phrases] int64."""

    owners: Tensor
    """Index of the history (TokenHistories) that each phrase applies to."""
    lengths: Tensor
    """Number of tokens before the last one."""
    before: Tensor
    """[phrases, longest] int64: tokens before the last one, right-aligned; padding is arbitrary."""
    last: Tensor
    """The token to ban."""
