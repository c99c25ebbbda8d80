"""Algorithm 1 of MoLink: decodes before prefills, and a limit on how long a prefill waits.

Source: "Distributed LLM Serving on Consumer-Grade GPUs by Reconciling Computation and
Communication", Findings of EMNLP 2025. gllm adds a smallest and a largest chunk.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from gllm.pacing.traffic import Chunk, LinkView, TrafficClass, WaitingMessage

PATIENCE = 30
"""Decisions for which a less urgent message waits at most: N of Algorithm 1."""
MIN_BYTES = 16_384
"""Smallest chunk in bytes: smaller ones cost more in headers and calls than they save in time."""


class DecodeFirstPolicy(ABC):
    """Base of link policies that send decode activations first, then prefills, then KV blocks.

    Decodes are sent whole, prefills and KV blocks in chunks, whose sizes subclasses choose.

    While decodes always wait, every `patience`-th decision (N in Algorithm 1) sends a chunk of the
    oldest prefill. KV blocks are sent while no other message waits, and otherwise with the same
    patience. Within a class the oldest message is first.

    The count restarts when no prefill waits. In Algorithm 1 as printed it does not: if the last
    prefill is cancelled at W >= N, neither branch sends the waiting decodes.

    Raises:
        ValueError: `patience` is less than 1.
    """

    uses_slack = True
    sends_whole = False

    def __init__(self, patience: int = PATIENCE) -> None:
        if patience < 1:
            raise ValueError(f"patience is {patience}: give at least 1")
        self._patience = patience
        self._num_prefill_waits = 0
        """Latest decisions at which both a decode and a prefill waited: W of Algorithm 1."""
        self._num_kv_waits = 0
        """Latest decisions at which KV blocks and a more urgent message waited."""

    def select(self, waiting: Sequence[WaitingMessage], view: LinkView) -> Chunk:
        """Return the oldest decode, or a chunk of a prefill or of KV blocks."""
        decode, prefill, kv_cache = _oldest_of_each_class(waiting)
        has_both = decode is not None and prefill is not None
        self._num_prefill_waits = self._num_prefill_waits + 1 if has_both else 0
        is_behind = kv_cache is not None and not (decode is prefill is None)
        self._num_kv_waits = self._num_kv_waits + 1 if is_behind else 0
        if kv_cache is not None and (not is_behind or self._num_kv_waits >= self._patience):
            self._num_kv_waits = 0
            return self._chunk(kv_cache, waiting, view, is_forced=is_behind)
        is_forced = self._num_prefill_waits >= self._patience
        if decode is not None and not is_forced:
            return Chunk(decode, waiting[decode].remaining_bytes)
        assert prefill is not None  # A message waits, and it is of no other class.
        self._num_prefill_waits = 0
        return self._chunk(prefill, waiting, view, is_forced)

    @abstractmethod
    def chunk_bytes(self, remaining_bytes: int, view: LinkView) -> int:
        """Return the size of a chunk while no more urgent message waits.

        Args:
            remaining_bytes: unsent bytes of the message, at least 1.
            view: rate of the link, and time until the next decode is ready.

        Returns:
            A number between 1 and `remaining_bytes`.
        """

    @abstractmethod
    def forced_bytes(self, remaining_bytes: int) -> int:
        """Return the size of a chunk that is sent although a more urgent message waits.

        Args:
            remaining_bytes: unsent bytes of the message, at least 1.
        """

    def _chunk(
        self, position: int, waiting: Sequence[WaitingMessage], view: LinkView, is_forced: bool
    ) -> Chunk:
        left = waiting[position].remaining_bytes
        return Chunk(
            position, self.forced_bytes(left) if is_forced else self.chunk_bytes(left, view)
        )


def clamp_chunk(budget_bytes: float, min_bytes: int, remaining_bytes: int) -> int:
    """Clamp a number of bytes to a chunk size between `min_bytes` and `remaining_bytes`.

    Args:
        budget_bytes: bytes that the link can send in time; may be negative, infinite or NaN, which
            counts as 0.
        min_bytes: smallest chunk.
        remaining_bytes: unsent bytes of the message, which may be fewer than the smallest chunk.
    """
    if budget_bytes >= remaining_bytes:
        return remaining_bytes
    chunk_bytes = int(budget_bytes) if budget_bytes > min_bytes else min_bytes
    return min(chunk_bytes, remaining_bytes)


def _oldest_of_each_class(
    waiting: Sequence[WaitingMessage],
) -> tuple[int | None, int | None, int | None]:
    """Return the position of the oldest decode, prefill and KV message; None where none waits."""
    positions: list[int | None] = [None] * len(TrafficClass)
    num_missing = len(positions)
    for position, message in enumerate(waiting):
        traffic_class = message.traffic_class
        if positions[traffic_class] is None:
            positions[traffic_class] = position
            num_missing -= 1
            if not num_missing:
                break
    decode, prefill, kv_cache = positions
    return decode, prefill, kv_cache


MAX_BYTES = 262_144
"""Largest chunk in bytes: a decode that comes earlier than predicted waits 21 ms for it at
100 Mbit/s. Larger ones would save nothing, because chunks follow each other without a gap."""
FLUSH_FACTOR = 4
"""Largest forced chunk, as a multiple of the smallest chunk."""


class MolinkPolicy(DecodeFirstPolicy):
    """Link policy `molink`: decodes first; prefill chunks fill the time until the next decode.

    A chunk has `min_bytes` to `max_bytes`. A prefill that has waited `patience` times sends
    FLUSH_FACTOR x `min_bytes`; Algorithm 1 as printed sends the whole rest, which would block
    decodes for 2.3 s (2,048 tokens of 14,336 bytes at 100 Mbit/s).

    Raises:
        ValueError: an argument is less than 1, or `max_bytes` less than `min_bytes`.
    """

    def __init__(
        self,
        min_bytes: int = MIN_BYTES,
        max_bytes: int = MAX_BYTES,
        patience: int = PATIENCE,
    ) -> None:
        super().__init__(patience)
        if not 1 <= min_bytes <= max_bytes:
            raise ValueError(
                f"min_bytes is {min_bytes} and max_bytes {max_bytes}: "
                "give 1 <= min_bytes <= max_bytes"
            )
        self._min_bytes = min_bytes
        self._max_bytes = max_bytes

    def chunk_bytes(self, remaining_bytes: int, view: LinkView) -> int:
        """Return the bytes that the link can send until the next decode is ready, within limits.

        If no decode is expected, this is the largest chunk.
        """
        limit_bytes = min(remaining_bytes, self._max_bytes)
        if view.slack_seconds is None:
            return limit_bytes
        budget_bytes = view.bytes_per_second * view.slack_seconds
        return clamp_chunk(budget_bytes, self._min_bytes, limit_bytes)

    def forced_bytes(self, remaining_bytes: int) -> int:
        """Return FLUSH_FACTOR x `min_bytes`, or all of a smaller message."""
        return min(FLUSH_FACTOR * self._min_bytes, remaining_bytes)
