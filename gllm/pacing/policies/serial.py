"""First come, first served: the link of Helix (arXiv 2406.01566), and the simulator's default."""

from collections.abc import Sequence

from gllm.pacing.traffic import Chunk, LinkView, WaitingMessage


class SerialPolicy:
    """Link policy `serial`: sends whole messages, first come, first served."""

    uses_slack = False
    sends_whole = True

    def select(self, waiting: Sequence[WaitingMessage], view: LinkView) -> Chunk:
        """Return the oldest message with all of its remaining bytes."""
        return Chunk(0, waiting[0].remaining_bytes)
