"""What a process tree uses of the machine, and what others use beside it.

Owns the reading of /proc. Knows nothing of peers, and needs nothing but the standard library: it
runs in the peers' environments too.
"""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

PROC = Path("/proc")
TICK = 1 / os.sysconf("SC_CLK_TCK")
"""Seconds."""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on (its state); none of a process that ended."""
    try:
        # The second is the name in brackets, which may hold anything.
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def tree(root: int) -> list[int]:
    """A process and all its descendants that live."""
    children = defaultdict(list)
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children[int(fields[1])].append(int(entry.name))
    found = [root]
    for pid in found:
        found += children[pid]
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time of processes, and of their children that have ended."""
    return TICK * sum(int(field) for pid in pids for field in _stat(pid)[11:15])


def busy_seconds() -> float:
    """CPU time of all that runs here, and what the host of a virtual machine took for others."""
    fields = (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _waiting, irq, soft_irq, stolen = map(int, fields)
    return TICK * (user + nice + system + irq + soft_irq + stolen)


def pss_bytes(pids: Iterable[int]) -> int:
    """Memory of processes, pages shared with others counted in equal parts."""
    total = 0
    for pid in pids:
        try:
            lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


class _Mark(NamedTuple):
    """The clocks at one moment, in seconds."""

    now: float
    busy: float
    ours: float


class CpuWatch:
    """CPU time from its making on: of a tree, and of strangers to it and to this process."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._begin = self._mark()

    def _mark(self) -> _Mark:
        own = {os.getpid(), *tree(self._root)}
        return _Mark(time.monotonic(), busy_seconds(), cpu_seconds(own))

    def foreign(self) -> float:
        """What strangers used, as a share (0..1) of all cores since the beginning.

        The clocks count in ticks of some milliseconds: it says little of less than a second.
        """
        end, begin = self._mark(), self._begin
        used = (end.busy - begin.busy) - (end.ours - begin.ours)
        return min(max(0.0, used / ((end.now - begin.now) * (os.cpu_count() or 1))), 1.0)


class MemoryWatch:
    """Looks at a tree's memory again and again until the context ends.

    Between two looks memory may have risen and fallen: engines keep what they once took, so little
    is missed. A look takes a core some milliseconds for each gigabyte of small pages.
    """

    def __init__(self, root: int, seconds: float = 5.0) -> None:
        self._root, self._seconds = root, seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
        self.peak = 0
        """Largest sum of PSS, bytes."""

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._over.wait(self._seconds):
            self._look()

    def _look(self) -> None:
        self.peak = max(self.peak, pss_bytes(tree(self._root)))
