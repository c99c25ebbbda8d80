"""Samples of the processes of a server, and the drift of their figures over a soak test."""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from benchmarks.cpu.watch import tree

PROC = Path("/proc")
AGE_BIN_SECONDS = 20.0
"""Width of the classes of age in which processes that are replaced are compared."""
OWN_MEMORY = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")
"""Kinds of memory that a process has allocated. Pages of files are divided among all processes of
the machine that map them, so their share changes with processes of others."""
FIGURES = ("memory_bytes", "resident_bytes", "num_descriptors", "num_threads")


class ProcessSample(msgspec.Struct, frozen=True):
    """Figures of one process at one moment."""

    role: str
    """Node and title, such as `head gllm-stage-0`."""
    pid: int
    seconds: float
    """Time since the start of the test."""
    age: float
    """Seconds since this process was first seen in this role."""
    epoch: int
    """Number of the engine's epoch."""
    memory_bytes: int
    """Allocated memory, shared memory in equal parts (PSS without files)."""
    resident_bytes: int
    """Resident memory, files included (RSS)."""
    num_descriptors: int
    num_threads: int


class Drift(NamedTuple):
    """Change of a figure between the first and the last third of a test."""

    first: float
    """Median of the first third."""
    last: float
    """Median of the last third."""
    share: float
    """Theil-Sen slope between the thirds times their distance, relative to the median: 0.01 is a
    growth by 1 %."""
    num_lives: int
    """Processes that had the role; 1 if none was replaced."""


class ProcessSampler:
    """Sampler of all processes below some roots.

    Args:
        roots: Process id by name of the node.
    """

    def __init__(self, roots: Mapping[str, int]) -> None:
        self._roots = roots
        self._begin = time.monotonic()
        self._births: dict[tuple[str, int], float] = {}
        self.pids: set[int] = set()
        """All processes that have been seen."""

    @property
    def seconds(self) -> float:
        """Time since construction."""
        return time.monotonic() - self._begin

    def sample(self, epoch: int) -> list[ProcessSample]:
        """Return a sample of each process that runs."""
        return [
            each
            for node, root in self._roots.items()
            for pid in tree(root)
            if (each := self._sample(node, pid, epoch)) is not None
        ]

    def processes(self, prefixes: Sequence[str]) -> dict[int, str]:
        """Return the roles of the processes whose titles begin with one of the prefixes."""
        return {
            pid: f"{node} {title}"
            for node, root in self._roots.items()
            for pid in tree(root)
            if (title := _title(pid)).startswith(tuple(prefixes))
        }

    def _sample(self, node: str, pid: int, epoch: int) -> ProcessSample | None:
        try:
            role = f"{node} {_title(pid)}"
            memory = _read_sizes(PROC / str(pid) / "smaps_rollup")
            status = _read_sizes(PROC / str(pid) / "status")
            num_descriptors = sum(1 for _ in (PROC / str(pid) / "fd").iterdir())
        except OSError:
            return None
        if "VmRSS:" not in status or not memory:
            return None  # It waits to be reaped.
        self.pids.add(pid)
        now = self.seconds
        return ProcessSample(
            role,
            pid,
            now,
            now - self._births.setdefault((role, pid), now),
            epoch,
            sum(memory.get(kind, 0) for kind in OWN_MEMORY) * 1024,
            status["VmRSS:"] * 1024,
            num_descriptors,
            status["Threads:"],
        )


def _title(pid: int) -> str:
    """Return the title of a process, or the module that a Python process runs."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode().split()
    except (OSError, UnicodeDecodeError):
        return ""
    if "-m" in words:
        return " ".join(words[words.index("-m") + 1 :][:1])
    return words[0] if words else ""


def _read_sizes(path: Path) -> dict[str, int]:
    """Return the numbers of a file of lines with a name and a number."""
    rows = [line.split() for line in path.read_text().splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def measure_drift(points: Iterable[tuple[float, float]]) -> Drift:
    """Return the drift of (seconds, value) points of one process.

    The slope is the median over all pairs of a point of the first and one of the last third of the
    time (Sen, "Estimates of the regression coefficient based on Kendall's tau", 1968), so that
    single samples have no influence.

    Raises:
        ValueError: A third has no point.
    """
    rows = sorted(points)
    if not rows:
        raise ValueError("a drift needs samples")
    begin, end = rows[0][0], rows[-1][0]
    third = (end - begin) / 3
    first = [row for row in rows if row[0] <= begin + third]
    last = [row for row in rows if row[0] >= end - third]
    if third <= 0:
        raise ValueError("a drift needs samples of different times")
    slope = median((b - a) / (at_b - at_a) for at_a, a in first for at_b, b in last)
    middle = median(value for _, value in rows)
    distance = median(at for at, _ in last) - median(at for at, _ in first)
    return Drift(
        median(value for _, value in first),
        median(value for _, value in last),
        slope * distance / middle if middle else float(slope > 0),
        1,
    )


def drift_at_equal_age(samples: Sequence[ProcessSample], figure: str) -> Drift:
    """Return the drift of a role whose processes are killed and replaced.

    A young process is smaller than an old one. Each sample is therefore divided by the median of
    all samples of its class of age; classes that one process alone has reached are left out.

    Raises:
        ValueError: There are not enough samples.
    """
    classes: dict[int, list[ProcessSample]] = defaultdict(list)
    for sample in samples:
        classes[int(sample.age / AGE_BIN_SECONDS)].append(sample)
    points = []
    for rows in classes.values():
        if len({row.pid for row in rows}) > 1:
            usual = median(getattr(row, figure) for row in rows) or 1
            points += [(row.seconds, getattr(row, figure) / usual) for row in rows]
    relative = measure_drift(points)
    usual = median(getattr(sample, figure) for sample in samples)
    return Drift(
        relative.first * usual,
        relative.last * usual,
        relative.share,
        len({sample.pid for sample in samples}),
    )


class RecoveryGrowth(NamedTuple):
    """Growth of a figure with each recovery that a process survives."""

    growth: float
    """Median over all pairs; 0 without a pair."""
    num_pairs: int
    """Pairs of consecutive epochs of one process."""


def growth_per_recovery(samples: Sequence[ProcessSample], figure: str) -> RecoveryGrowth:
    """Return by how much a figure grows with each recovery that a process survives.

    Compares the medians of a process in consecutive epochs, from the second one that it lives
    in.
    """
    lives: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        lives[sample.pid][sample.epoch].append(getattr(sample, figure))
    steps = []
    for epochs in lives.values():
        medians = [median(values) for _, values in sorted(epochs.items())][1:]
        steps += [b - a for a, b in pairwise(medians)]
    return RecoveryGrowth(median(steps) if steps else 0.0, len(steps))


def group_by_role(samples: Iterable[ProcessSample]) -> dict[str, list[ProcessSample]]:
    """Return the samples by role, in the order of the roles' names."""
    groups: dict[str, list[ProcessSample]] = defaultdict(list)
    for sample in samples:
        groups[sample.role].append(sample)
    return dict(sorted(groups.items()))


def one_per_minute(samples: Iterable[ProcessSample]) -> list[ProcessSample]:
    """Return the first sample of each process in each minute: enough to draw its course."""
    kept: dict[tuple[str, int, int], ProcessSample] = {}
    for sample in samples:
        kept.setdefault((sample.role, sample.pid, int(sample.seconds / 60)), sample)
    return list(kept.values())


def drift_of_role(samples: Sequence[ProcessSample], figure: str) -> Drift:
    """Return the drift of a figure of a role, by age if processes were replaced.

    Raises:
        ValueError: There are not enough samples.
    """
    if len({sample.pid for sample in samples}) > 1:
        return drift_at_equal_age(samples, figure)
    return measure_drift((sample.seconds, getattr(sample, figure)) for sample in samples)
