"""CPU time and memory of a process tree, and CPU time of all other processes, from /proc.

This module needs only the standard library, because it runs in the peers' environments too.
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
"""Seconds per clock tick."""


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on; empty if the process exited."""
    try:
        # The second field is the name in brackets, which may contain any character.
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def tree(root: int) -> list[int]:
    """Return a process and all its live descendants."""
    children = defaultdict(list)
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children[int(fields[1])].append(int(entry.name))
    pids = [root]
    for pid in pids:
        pids += children[pid]
    return pids


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU seconds of processes and of their children that have exited."""
    return TICK * sum(int(field) for pid in pids for field in _stat(pid)[11:15])


def busy_seconds() -> float:
    """Return the CPU seconds of all processes, and those that a virtual machine's host withheld."""
    fields = (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _waiting, irq, soft_irq, stolen = map(int, fields)
    return TICK * (user + nice + system + irq + soft_irq + stolen)


def pss_bytes(pids: Iterable[int]) -> int:
    """Return the PSS of processes in bytes: shared pages count in equal parts."""
    total = 0
    for pid in pids:
        try:
            lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


class _Mark(NamedTuple):
    """CPU clocks at one moment, in seconds."""

    now: float
    busy: float
    ours: float


class CpuWatch:
    """CPU time since construction of processes outside a process tree and this process."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._begin = self._mark()

    def _mark(self) -> _Mark:
        own = {os.getpid(), *tree(self._root)}
        return _Mark(time.monotonic(), busy_seconds(), cpu_seconds(own))

    def foreign(self) -> float:
        """Return the CPU time of other processes since construction.

        The result is a share (0..1) of all cores. The clocks have a resolution of some
        milliseconds, so intervals under a second are imprecise.
        """
        end, begin = self._mark(), self._begin
        used = (end.busy - begin.busy) - (end.ours - begin.ours)
        return min(max(0.0, used / ((end.now - begin.now) * (os.cpu_count() or 1))), 1.0)


class MemoryWatch:
    """Periodic sampler of a process tree's memory, until the context ends.

    Peaks between two samples are missed; engines keep the memory that they have allocated, so
    little is lost. A sample takes some milliseconds of a core per gigabyte of small pages.
    """

    def __init__(self, root: int, seconds: float = 5.0) -> None:
        self._root, self._seconds = root, seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
        self.peak = 0
        """Maximum total PSS, in bytes."""

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
