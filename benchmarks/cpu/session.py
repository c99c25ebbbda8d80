"""One run of the comparison: peers are prepared, then measured in rounds of alternating order.

A peer that fails is recorded with its reason; the others continue.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.cpu.environments import install, published_version
from benchmarks.cpu.limits import Rates, measured
from benchmarks.cpu.peers import Peer
from benchmarks.cpu.results import Results
from benchmarks.cpu.workplace import PeerError, Workplace, run


def print_progress(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def create_model(work: Workplace) -> None:
    """Create the model of a workplace in a process of its own.

    Raises:
        PeerError: The process fails.
    """
    command = [sys.executable, "-m", "benchmarks.cpu.model", work.model, work.shape]
    run(command, work.log("model"))


class Session:
    """The peers that have not failed, and the results so far.

    Args:
        work: Folders of the comparison.
        peers: The peers in the order of their turns.
        results: The results so far.
        create_model: Creates the model of a workplace.
        measure_limits: Returns the limits of the machine with a number of threads.
    """

    def __init__(
        self,
        work: Workplace,
        peers: list[Peer],
        results: Results,
        create_model: Callable[[Workplace], None] = create_model,
        measure_limits: Callable[[int], Rates] = measured,
    ) -> None:
        self.work = work
        self.results = results
        self._peers = peers
        self._create_model = create_model
        self._measure_limits = measure_limits
        self.sources: dict[str, Path] = {}
        """Path of the model files by peer."""

    @property
    def path(self) -> Path:
        """Path of the results' file."""
        return self.work.folder / "results" / f"{self.results.mode}.json"

    def prepare(self) -> None:
        """Create the models, and each peer's environment and model files."""
        for shape in dict.fromkeys(peer.shape for peer in self._peers):
            print_progress(f"the model of the shape of {shape}")
            self._create_model(self.work.with_shape(shape))
        for peer in self._peers:
            with self.attempt(peer):
                print_progress(f"preparing {peer.name}")
                install(self.work, peer.environment)
                work = self.work.with_shape(peer.shape)
                source = self.sources[peer.name] = peer.prepare(work, peer.weights)
                if source.is_file():
                    self.results.file_bytes[peer.name] = source.stat().st_size
                self.results.versions[peer.name] = published_version(self.work, peer.environment)

    @contextmanager
    def attempt(self, peer: Peer) -> Iterator[None]:
        """Record a failure of the peer within the block instead of raising it."""
        try:
            yield
        except PeerError as error:
            print_progress(f"{peer.name}: {error}")
            self.results.refused[peer.name] = str(error)

    def rounds(self, count: int) -> Iterator[tuple[int, Peer]]:
        """Yield (round, peer) for every round and every peer that has not failed.

        Odd rounds run in reverse order. Limits are measured before each round; results are saved
        after it.
        """
        for turn in range(count):
            for threads in sorted({1, self.work.threads}):
                self.results.limits.append(self._measure_limits(threads))
            for peer in self._peers if turn % 2 == 0 else reversed(self._peers):
                if peer.name not in self.results.refused:
                    print_progress(f"round {turn + 1} of {count}: {peer.name}")
                    yield turn, peer
            self.results.save(self.path)
