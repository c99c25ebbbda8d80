"""One run of the comparison: peers made ready, then measured round by round, in alternating order.

Owns the order, and that a peer which fails is named with its reason while the rest goes on. Knows
nothing of what is measured.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.cpu.environments import install, version_told
from benchmarks.cpu.limits import measured
from benchmarks.cpu.peers import Peer
from benchmarks.cpu.results import Results
from benchmarks.cpu.workplace import PeerError, Workplace, run


def say(text: str) -> None:
    """Tell how far it is."""
    print(text, file=sys.stderr, flush=True)


class Session:
    """The peers that are left, and the results so far."""

    def __init__(self, work: Workplace, peers: list[Peer], results: Results) -> None:
        self.work = work
        self.results = results
        self._peers = peers
        self.sources: dict[str, Path] = {}
        """What each peer loads."""

    @property
    def path(self) -> Path:
        """The results' file."""
        return self.work.folder / "results" / f"{self.results.mode}.json"

    def prepare(self) -> None:
        """Make the model, and each peer's environment and what it loads."""
        say("the model")
        run([sys.executable, "-m", "benchmarks.cpu.model", self.work.model], self.work.log("model"))
        for peer in self._peers:
            with self.attempt(peer):
                say(f"preparing {peer.name}")
                install(self.work, peer.environment)
                self.sources[peer.name] = peer.prepare(self.work, peer.weights)
                self.results.versions[peer.name] = version_told(self.work, peer.environment)

    @contextmanager
    def attempt(self, peer: Peer) -> Iterator[None]:
        """A block in which this peer may fail: then it is refused."""
        try:
            yield
        except PeerError as error:
            say(f"{peer.name}: {error}")
            self.results.refused[peer.name] = str(error)

    def rounds(self, count: int) -> Iterator[tuple[int, Peer]]:
        """(round, peer) for every round and every peer that is left; odd rounds backwards. Limits
        are measured before each round, results saved after it."""
        for turn in range(count):
            for threads in sorted({1, self.work.threads}):
                self.results.limits.append(measured(threads))
            for peer in self._peers if turn % 2 == 0 else reversed(self._peers):
                if peer.name not in self.results.refused:
                    say(f"round {turn + 1} of {count}: {peer.name}")
                    yield turn, peer
            self.results.save(self.path)
