"""Fair sharing: the link of systems that send each message on its own, such as vLLM."""

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

from gllm.pacing.traffic import Chunk, LinkView, WaitingMessage

TURN_BYTES = 65_536
"""Bytes of a message before the next one has its turn."""

_number = attrgetter("number")


class ConcurrentPolicy:
    """Equal shares of the link for all messages that wait, in turns of `turn_bytes`.

    Raises:
        ValueError: `turn_bytes` is less than 1.
    """

    uses_slack = False
    sends_whole = False

    def __init__(self, turn_bytes: int = TURN_BYTES) -> None:
        if turn_bytes < 1:
            raise ValueError(f"turn_bytes is {turn_bytes}: give at least 1")
        self._turn_bytes = turn_bytes
        self._last_number = -1
        """Number of the message that had the latest turn."""

    def select(self, waiting: Sequence[WaitingMessage], view: LinkView) -> Chunk:
        """Return a chunk of the message behind the one that had the latest turn."""
        position = bisect_right(waiting, self._last_number, key=_number)
        if position == len(waiting):
            position = 0
        message = waiting[position]
        self._last_number = message.number
        return Chunk(position, min(self._turn_bytes, message.remaining_bytes))
