"""How long an event loop does not get to its callbacks.

Owns the measurement, by the clock and by the loop's own CPU time. Knows nothing of requests.
"""

import asyncio
import time
from dataclasses import dataclass


@dataclass
class Gaps:
    """The longest turns of a loop."""

    wall_seconds: float = 0.0
    """By the clock: also while other threads hold the interpreter, or other processes the cores."""
    cpu_seconds: float = 0.0
    """CPU time of the loop's thread: what ran on the loop itself, however busy the machine is."""


class LoopWatch:
    """Watches the running loop: `with LoopWatch() as gaps: await ...`.

    A callback in every turn of the loop, which therefore never sleeps.
    """

    def __enter__(self) -> Gaps:
        self._gaps = Gaps()
        self._loop = asyncio.get_running_loop()
        self._wall, self._cpu = time.perf_counter(), time.thread_time()
        self._handle = self._loop.call_soon(self._tick)
        return self._gaps

    def __exit__(self, *_: object) -> None:
        self._handle.cancel()

    def _tick(self) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        self._gaps.wall_seconds = max(self._gaps.wall_seconds, wall - self._wall)
        self._gaps.cpu_seconds = max(self._gaps.cpu_seconds, cpu - self._cpu)
        self._wall, self._cpu = wall, cpu
        self._handle = self._loop.call_soon(self._tick)
