"""Fetches that wait for a thread, and circuit breakers of the engines they read from. Pure.

A peer is another engine, by its endpoint. A peer that does not answer must not keep the fetches of
others waiting, nor its own: their prompts are computed.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gllm.recovery.backoff import backoff_seconds

OPEN_SECONDS = 2.0
"""Time without fetches from a peer after its first failure; twice as long after each further one
..."""
MAX_OPEN_SECONDS = 60.0
"""... up to this."""
MAX_PEERS = 1024
"""Peers with an open circuit that are remembered; the one that failed longest ago is forgotten."""

T = TypeVar("T")


@dataclass
class _Circuit:
    num_failures: int = 0
    """Failures since the last answer."""
    opened_at: float = 0.0
    open_until: float = 0.0
    is_probing: bool = False
    """True while one fetch tries whether the peer answers again."""


class PeerCircuits:
    """Circuit breaker for each peer: after a fetch without an answer there are none for a while.

    Then one fetch, the probe, tries again. It closes the circuit, or opens it for twice as long.
    """

    def __init__(self) -> None:
        """Create closed circuits."""
        self._circuits: dict[bytes, _Circuit] = {}
        """Circuits of the peers that have failed last, the one that failed longest ago first."""

    def __len__(self) -> int:
        """Return the number of peers whose last fetch has failed."""
        return len(self._circuits)

    def may_fetch(self, peer: bytes, now: float) -> bool:
        """Return True if a fetch may begin; the end of one that begins has to be reported."""
        circuit = self._circuits.get(peer)
        if circuit is None:
            return True
        if now < circuit.open_until or circuit.is_probing:
            return False
        circuit.is_probing = True
        return True

    def on_answer(self, peer: bytes) -> None:
        """Close the circuit of a peer that has answered."""
        self._circuits.pop(peer, None)

    def on_silence(self, peer: bytes, begin: float, now: float) -> float:
        """Open the circuit of a peer that has not answered a fetch; return for how many seconds.

        Args:
            peer: endpoint of the peer.
            begin: start of the fetch in seconds. The failure of one that has begun before the
                circuit opened tells nothing new: 0 is returned.
            now: time in seconds.
        """
        circuit = self._circuits.pop(peer, None) or _Circuit()
        self._circuits[peer] = circuit
        if circuit.num_failures and begin < circuit.opened_at:
            return 0.0
        circuit.is_probing = False
        circuit.num_failures += 1
        seconds = backoff_seconds(circuit.num_failures - 1, OPEN_SECONDS, MAX_OPEN_SECONDS)
        circuit.opened_at, circuit.open_until = now, now + seconds
        if len(self._circuits) > MAX_PEERS:
            del self._circuits[next(iter(self._circuits))]
        return seconds

    def on_cancelled(self, peer: bytes) -> None:
        """Let another fetch probe, because this one has ended for another reason."""
        if (circuit := self._circuits.get(peer)) is not None:
            circuit.is_probing = False


@dataclass
class _PeerFetches(Generic[T]):
    waiting: deque[T] = field(default_factory=deque)
    num_running: int = 0


class FetchQueue(Generic[T]):
    """Bounded queue of fetches for each peer, with a limit of those that run at the same time."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        """Create an empty queue.

        Args:
            max_running: largest number of running fetches per peer.
            max_waiting: largest number of waiting fetches per peer.
        """
        self._max_running, self._max_waiting = max_running, max_waiting
        self._peers: dict[bytes, _PeerFetches[T]] = {}
        """Peers with fetches; the one that had its turn longest ago is first."""

    @property
    def num_waiting(self) -> int:
        """Number of waiting fetches."""
        return sum(len(fetches.waiting) for fetches in self._peers.values())

    def push(self, peer: bytes, fetch: T) -> bool:
        """Append a fetch; return False if too many wait for this peer."""
        fetches = self._peers.setdefault(peer, _PeerFetches())
        if len(fetches.waiting) >= self._max_waiting:
            return False
        fetches.waiting.append(fetch)
        return True

    def pop(self) -> tuple[bytes, T] | None:
        """Return the next fetch, which runs until `end`; None if none may run. Peers take turns."""
        for peer, fetches in self._peers.items():
            if fetches.waiting and fetches.num_running < self._max_running:
                fetches.num_running += 1
                self._peers[peer] = self._peers.pop(peer)
                return peer, fetches.waiting.popleft()
        return None

    def end(self, peer: bytes) -> None:
        """Count a running fetch as ended."""
        fetches = self._peers[peer]
        fetches.num_running -= 1
        self._forget_idle(peer)

    def drop(self, peer: bytes) -> list[T]:
        """Remove and return the waiting fetches of a peer."""
        fetches = self._peers.get(peer)
        if fetches is None:
            return []
        dropped = list(fetches.waiting)
        fetches.waiting.clear()
        self._forget_idle(peer)
        return dropped

    def _forget_idle(self, peer: bytes) -> None:
        fetches = self._peers[peer]
        if not (fetches.waiting or fetches.num_running):
            del self._peers[peer]
