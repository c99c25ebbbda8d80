"""Chunks of one size: MoLink's platform paper, whose chunk does not depend on the next decode."""

from gllm.pacing.policies.molink import PATIENCE, DecodeFirstPolicy
from gllm.pacing.traffic import LinkView

CHUNK_BYTES = 65_536
"""Size of a chunk in bytes: a decode waits 5 ms for it at 100 Mbit/s."""


class FixedChunkPolicy(DecodeFirstPolicy):
    """Decodes first; everything else in chunks of `chunk_bytes`.

    Raises:
        ValueError: An argument is less than 1.
    """

    uses_slack = False
    sends_whole = False

    def __init__(self, chunk_bytes: int = CHUNK_BYTES, patience: int = PATIENCE) -> None:
        super().__init__(patience)
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes is {chunk_bytes}: give at least 1")
        self._chunk_bytes = chunk_bytes

    def chunk_bytes(self, remaining_bytes: int, view: LinkView) -> int:
        """Return the size of a chunk, or all of a smaller message."""
        return min(self._chunk_bytes, remaining_bytes)

    def forced_bytes(self, remaining_bytes: int) -> int:
        """Return the same size."""
        return min(self._chunk_bytes, remaining_bytes)
