"""Memory pressure of the machine: what the kernel reports of it, and when tiers of a cache rest."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

HIGH_PERCENT = 10.0
"""Share of the last 10 s in which all tasks waited for memory, from which on a tier rests."""
LOW_PERCENT = 1.0
"""Share below which it goes on."""
PRESSURE_FILES = (
    Path("/proc/pressure/memory"),
    # Of this container, where the system has control groups of version 2.
    Path("/sys/fs/cgroup/memory.pressure"),
)


class PressureGate:
    """Decides from the memory pressure whether a tier rests. Pure: the pressure is an argument.

    Between the two limits the last decision holds, so that a tier does not flap.
    """

    def __init__(self) -> None:
        """Create a gate of a tier that works."""
        self.is_resting = False

    def update(self, percent: float) -> bool:
        """Return True if the tier rests.

        Args:
            percent: share of the last 10 s in which all tasks waited for memory, 0 to 100.
        """
        limit = LOW_PERCENT if self.is_resting else HIGH_PERCENT
        self.is_resting = percent >= limit
        return self.is_resting


def read_memory_pressure(paths: Iterable[Path] = PRESSURE_FILES) -> float:
    """Return the share of the last 10 s in which all tasks waited for memory, in percent.

    The highest value of several files counts; 0 if the kernel reports none (`CONFIG_PSI`).

    Args:
        paths: files in the format of /proc/pressure/memory.
    """
    return max(map(_read, paths), default=0.0)


def _read(path: Path) -> float:
    """Return `avg10` of the line `full`; 0 if the file cannot be read or has another format."""
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            kind, *fields = line.split()
            if kind == "full":
                return float(dict(field.split("=", 1) for field in fields).get("avg10", 0.0))
    return 0.0
