"""Decides when the KV of a running request is copied to another engine, and to which one.

The copy is in the other engine's prefix cache, so if the request's own engine is lost, the other
one computes only what came after the last copy. A later copy adds the blocks since the one before.

Source: "Splitwise" (ISCA'24, arXiv 2311.18677), which proposes checkpoints of the KV cache for
fault tolerance. Pure: time is an argument.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

MIN_SECONDS = 1.0
"""Least time between the starts of two copies of a request: a copy should have ended before."""
LEASE_SECONDS = 30.0
"""Age at which both engines have forgotten the ticket of a copy."""

Key = TypeVar("Key", bound=Hashable)


class Copy(NamedTuple):
    """One copy of the first tokens of a request."""

    source: str
    """Engine that computes the request."""
    target: str
    """Engine that gets the copy."""
    num_tokens: int
    """Leading tokens of prompt and output."""


class CopyTicket(NamedTuple):
    """Ticket of a copy that both engines may forget."""

    ticket: int
    copy: Copy


@dataclass(slots=True)
class _Copies:
    """Copies of one request."""

    latest: Copy
    started_at: float
    tickets: list[tuple[float, CopyTicket]] = field(default_factory=list)
    """Times of the copies whose tickets are not forgotten."""


class Checkpoints(Generic[Key]):
    """Table of the copies of running requests.

    Args:
        interval_tokens: computed tokens after which a request is copied, and copied again.
    """

    def __init__(self, interval_tokens: int) -> None:
        self._interval_tokens = interval_tokens
        self._copies: dict[Key, _Copies] = {}

    def plan(
        self, key: Key, source: str, targets: Sequence[tuple[str, int]], num_known: int, now: float
    ) -> Copy | None:
        """Return the copy that is due; None if none is.

        Args:
            key: a running request.
            source: engine that computes it.
            targets: other engines that can have a copy, with the size of their blocks in tokens;
                the best one first. The target of the last copy is kept while it is among them.
            num_known: tokens of prompt and output so far; all but the last one are computed.
            now: time in seconds.
        """
        if not targets:
            return None
        copies, earlier = self._copies.get(key), 0
        target, block_size = targets[0]
        if copies is not None:
            if now - copies.started_at < MIN_SECONDS:
                return None
            sizes = dict(targets)
            if copies.latest.target in sizes:
                target, earlier = copies.latest.target, copies.latest.num_tokens
                block_size = sizes[target]
        # Of a block that is not full, the cache of the target would have nothing.
        num_tokens = (num_known - 1) // block_size * block_size
        if num_tokens - earlier < self._interval_tokens:
            return None
        return Copy(source, target, num_tokens)

    def on_started(self, key: Key, copy: Copy, ticket: int, now: float) -> None:
        """Note that a copy has started."""
        copies = self._copies.get(key)
        if copies is None:
            copies = self._copies[key] = _Copies(copy, now)
        copies.latest, copies.started_at = copy, now
        copies.tickets.append((now, CopyTicket(ticket, copy)))

    def target_of(self, key: Key) -> str:
        """Return the engine that has the latest copy of a request; empty if there is none."""
        copies = self._copies.get(key)
        return "" if copies is None else copies.latest.target

    def pop_expired(self, now: float) -> list[CopyTicket]:
        """Remove and return the tickets that both engines have forgotten by themselves."""
        expired = []
        for copies in self._copies.values():
            while copies.tickets and now - copies.tickets[0][0] >= LEASE_SECONDS:
                expired.append(copies.tickets.pop(0)[1])
        return expired

    def end(self, key: Key) -> list[CopyTicket]:
        """Forget a request; return its tickets, whose copies need not go on."""
        copies = self._copies.pop(key, None)
        return [] if copies is None else [ticket for _, ticket in copies.tickets]

    def on_engine_lost(self, engine: str) -> None:
        """Forget the copies that an engine had."""
        for key, copies in list(self._copies.items()):
            if copies.latest.target == engine:
                del self._copies[key]

    @property
    def keys(self) -> list[Key]:
        """Requests that have a copy."""
        return list(self._copies)
