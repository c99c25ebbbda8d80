"""Algorithm 1 of MoLink as printed, with just-in-time chunks."""

from gllm.pacing.policies.molink import (
    MIN_BYTES,
    PATIENCE,
    DecodeFirstPolicy,
    clamp_chunk,
)
from gllm.pacing.traffic import LinkView


class MolinkPaperPolicy(DecodeFirstPolicy):
    """Decodes first; a prefill chunk fills the link until the next decode is ready.

    A prefill that has waited `patience` times is sent to its end, however long that takes. Two
    cases that the paper leaves open are defined: a chunk has at least `min_bytes`, because the
    just-in-time size may be 0 or negative, and a link without prefills sends its decodes at once.

    Raises:
        ValueError: An argument is less than 1.
    """

    def __init__(self, min_bytes: int = MIN_BYTES, patience: int = PATIENCE) -> None:
        super().__init__(patience)
        if min_bytes < 1:
            raise ValueError(f"min_bytes is {min_bytes}: give at least 1")
        self._min_bytes = min_bytes

    def chunk_bytes(self, remaining_bytes: int, view: LinkView) -> int:
        """Return the bytes that the link sends until the next decode is ready.

        All of the message if no decode is under way.
        """
        if view.slack_seconds is None:
            return remaining_bytes
        budget_bytes = view.bytes_per_second * view.slack_seconds
        return clamp_chunk(budget_bytes, self._min_bytes, remaining_bytes)

    def forced_bytes(self, remaining_bytes: int) -> int:
        """Return all of the message."""
        return remaining_bytes
