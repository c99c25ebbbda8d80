"""Algorithm 1 of MoLink with bounds: no chunk delays a decode for longer than it has to."""

from gllm.pacing.policies.decode_first import LEAST_BYTES, PATIENCE, DecodeFirstPolicy, clamp_chunk
from gllm.pacing.traffic import LinkView

MOST_BYTES = 262_144
"""Largest chunk in bytes: a decode that comes earlier than predicted waits 21 ms for it at
100 Mbit/s. Larger ones would save nothing, because chunks follow each other without a gap."""
FLUSH_FACTOR = 4
"""Largest forced chunk, as a multiple of the smallest chunk."""


class MolinkPolicy(DecodeFirstPolicy):
    """Decodes first; a prefill chunk fills the link until the next decode is ready, within bounds.

    A chunk has `least_bytes` to `most_bytes`. A prefill that has waited `patience` times sends
    FLUSH_FACTOR x `least_bytes`; Algorithm 1 as printed sends the whole rest, which would block
    decodes for 2.3 s (2,048 tokens of 14,336 bytes at 100 Mbit/s).

    Raises:
        ValueError: An argument is less than 1, or `most_bytes` less than `least_bytes`.
    """

    def __init__(
        self,
        least_bytes: int = LEAST_BYTES,
        most_bytes: int = MOST_BYTES,
        patience: int = PATIENCE,
    ) -> None:
        super().__init__(patience)
        if not 1 <= least_bytes <= most_bytes:
            raise ValueError(
                f"least_bytes is {least_bytes} and most_bytes {most_bytes}: "
                "give 1 <= least_bytes <= most_bytes"
            )
        self._least_bytes = least_bytes
        self._most_bytes = most_bytes

    def chunk_bytes(self, remaining_bytes: int, view: LinkView) -> int:
        """Return the bytes that the link sends until the next decode is ready, within the bounds.

        The largest chunk if no decode is under way.
        """
        limit_bytes = min(remaining_bytes, self._most_bytes)
        if view.slack_seconds is None:
            return limit_bytes
        budget_bytes = view.bytes_per_second * view.slack_seconds
        return clamp_chunk(budget_bytes, self._least_bytes, limit_bytes)

    def forced_bytes(self, remaining_bytes: int) -> int:
        """Return FLUSH_FACTOR x `least_bytes`, or all of a smaller message."""
        return min(FLUSH_FACTOR * self._least_bytes, remaining_bytes)
