"""Slow steps of a stage on a CPU, and what the kernel knows of the reason.

Steps of about as many tokens take about as long. One that takes several times as long while the
threads of the worker waited for a core is a matter of the machine, which its user should know.
"""

from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

SLOWDOWN = 5.0
"""Multiple of the usual time from which on a step is slow."""
MIN_SECONDS = 0.05
"""A shorter step is never slow."""
NUM_STEPS = 31
"""Steps of a size of which the median is the usual time."""
MIN_STEPS = 8
"""Steps of a size before its usual time is known."""
BASE_SECONDS = 1.0
"""Age at which the counters are read anew."""
REASON_SHARE = 0.3
"""Share of the lost time that a counter has to explain."""
SILENT_SECONDS = 600.0
"""Time after a message in which there is no other one."""


class WaitCounters(NamedTuple):
    """Counters of the kernel since the process began: what kept it from computing."""

    core_seconds: float
    """Threads of the process waited for a core, together."""
    throttled_seconds: float
    """The control group had used up its CPU quota."""
    stolen_seconds: float
    """The host of a virtual machine ran others on its cores."""
    page_reads: int
    """Pages that were read from a disk before a thread could go on."""


class SlowSteps:
    """Finds steps that take several times as long as usual, for a reason that the kernel gives.

    Reads no clock and no file: both are arguments.

    Args:
        read: returns the counters of this process.
    """

    def __init__(self, read: Callable[[], WaitCounters]) -> None:
        self._read = read
        self._seconds: dict[int, deque[float]] = {}
        """Times of the last steps, by the number of bits of the number of tokens."""
        self._base: tuple[float, WaitCounters] | None = None
        """Counters, and when they were read."""
        self._silent_until = 0.0

    def add(self, num_tokens: int, begin: float, end: float) -> str | None:
        """Count a step, in seconds of one clock; return a message about it, mostly None."""
        seconds = end - begin
        last = self._seconds.setdefault(num_tokens.bit_length(), deque(maxlen=NUM_STEPS))
        message = None
        if len(last) >= MIN_STEPS and seconds >= MIN_SECONDS and end >= self._silent_until:
            usual = median(last)
            if seconds >= SLOWDOWN * usual and self._base is not None:
                since, base = self._base
                reason = _reason(base, self._read(), seconds - usual)
                if reason:
                    self._silent_until = end + SILENT_SECONDS
                    message = (
                        f"a step of {num_tokens} tokens took {seconds:.2f} s instead of "
                        f"{usual:.3f} s: in the last {end - since:.1f} s {reason}"
                    )
        last.append(seconds)
        if self._base is None or end - self._base[0] >= BASE_SECONDS:
            self._base = end, self._read()
        return message


def _reason(base: WaitCounters, now: WaitCounters, lost_seconds: float) -> str:
    """Return what explains most of the lost time; empty if nothing explains enough of it."""
    reasons = {
        "the CPU quota of its control group was used up for {:.2f} s; give it more, or fewer "
        "--threads": now.throttled_seconds - base.throttled_seconds,
        "the host of this virtual machine ran others on its cores for {:.2f} s": (
            now.stolen_seconds - base.stolen_seconds
        ),
        "its threads waited {:.2f} s for a core that other processes used": (
            now.core_seconds - base.core_seconds
        ),
    }
    text, seconds = max(reasons.items(), key=lambda item: item[1])
    if seconds >= REASON_SHARE * lost_seconds:
        return text.format(seconds)
    num_reads = now.page_reads - base.page_reads
    return f"{num_reads} pages were read from a disk: memory is short" if num_reads > 100 else ""
