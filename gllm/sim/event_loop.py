"""Simulated time: a heap of events, ordered by time, then rank, then insertion."""

import gc
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any, Generic, TypeVar

T = TypeVar("T")

COMMIT, ARRIVAL, ABORT, REPORT, DRIVER_TURN, PIPELINE = range(6)
"""Ranks of events at one time: a driver receives all events of a moment before it schedules."""

NANOSECONDS = 1e9
"""Units of an event's time per second: finer differences are rounding errors."""
MAX_SCALED_SECONDS = 2.0**21
"""Time below which a product with NANOSECONDS has an error of less than half a nanosecond."""


class EventLoop:
    """Clock and heap of events. All engines and links of a simulation share one.

    An event is a call `handle(time, argument)`. Bound methods with an argument keep an event as
    small as a tuple, where a closure per event would cost more than the event itself.
    """

    __slots__ = ("_heap", "_numbers", "now")

    def __init__(self) -> None:
        self.now = 0.0
        """Time of the present event in seconds."""
        self._heap: list[tuple[float, int, int, Callable[[float, Any], None], Any]] = []
        self._numbers = count()

    def push(self, time: float, rank: int, handle: Callable[[float, T], None], argument: T) -> None:
        """Add an event, at whole nanoseconds.

        Args:
            time: Time in seconds, not in the past.
            rank: Order among events at one time; smaller ranks go first.
            handle: Called with the time and the argument.
            argument: Second argument of the call.

        Raises:
            ValueError: The time is in the past.
        """
        if time < MAX_SCALED_SECONDS:
            # Equal to round(time, 9), in a third of its time.
            time = round(time * NANOSECONDS) / NANOSECONDS
        else:
            time = round(time, 9)
        if time < self.now:
            raise ValueError(f"an event at {time} s is due before {self.now} s: sort the events")
        heappush(self._heap, (time, rank, next(self._numbers), handle, argument))

    def push_each(
        self, items: Iterable[tuple[float, T]], rank: int, handle: Callable[[float, T], None]
    ) -> None:
        """Add an event per item, the next one when the previous one happens.

        Args:
            items: Times in seconds and arguments, sorted by time. May be a generator: only one item
                is in memory.
            rank: Order among events at one time.
            handle: Called with the time and the argument.

        Raises:
            ValueError: The first time is in the past; `run` raises it for a later one.
        """
        _EventStream(self, iter(items), rank, handle).advance()

    def run(self, until: float = inf) -> float:
        """Run the events and all that follow from them up to a time; return the last one's time.

        Python's garbage collector pauses: events make no reference cycles, and every full
        collection would visit all requests so far.

        Raises:
            ValueError: An event is due before the one that caused it.
        """
        collects_garbage = gc.isenabled()
        gc.disable()
        try:
            self._run(until)
        finally:
            if collects_garbage:
                gc.enable()
        return self.now

    def _run(self, until: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= until:
            time, _, _, handle, argument = heappop(heap)
            self.now = time
            handle(time, argument)


class _EventStream(Generic[T]):
    """Items of `push_each` that have not happened."""

    __slots__ = ("_handle", "_items", "_loop", "_rank")

    def __init__(
        self,
        loop: EventLoop,
        items: Iterator[tuple[float, T]],
        rank: int,
        handle: Callable[[float, T], None],
    ) -> None:
        self._loop = loop
        self._items = items
        self._rank = rank
        self._handle = handle

    def advance(self) -> None:
        """Push the next item, if there is one."""
        for time, argument in self._items:
            self._loop.push(time, self._rank, self._happen, argument)
            return

    def _happen(self, now: float, argument: T) -> None:
        self._handle(now, argument)
        self.advance()
