"""Watch of an event loop: its longest iterations, by wall clock and by CPU time of its thread."""

import asyncio
import time
from dataclasses import dataclass


@dataclass
class Gaps:
    """The longest iterations of a loop."""

    wall_seconds: float = 0.0
    """Wall-clock seconds, including waits for the GIL and for a core."""
    cpu_seconds: float = 0.0
    """CPU seconds of the loop's thread: work on the loop itself, however busy the machine is."""


class LoopWatch:
    """Context that watches the running loop: `with LoopWatch() as gaps: await ...`.

    It schedules a callback in every iteration of the loop, which therefore never sleeps.
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
