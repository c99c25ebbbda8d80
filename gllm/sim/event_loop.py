"""Simulated time: a heap of events, ordered by time, then rank, then insertion."""

import gc
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any, TypeVar

T = TypeVar("T")

Event = tuple[float, int, int, Callable[[float, Any], None], Any]
"""Time, rank, number in the order of insertion, handle and argument."""

COMMIT, ARRIVAL, ABORT, REPORT, DRIVER_TURN, PIPELINE = range(6)
"""Ranks of events at one time: a driver receives all events of a moment before it schedules."""

NANOSECONDS = 1e9
"""Units of an event's time per second: finer differences are rounding errors."""
CHECK_EVENTS = 64
"""Events between two calls of a loop's check: a few milliseconds."""
MAX_SCALED_SECONDS = 2.0**21
"""Time below which a product with NANOSECONDS has an error of less than half a nanosecond."""


class EventLoop:
    """Discrete-event simulation loop: a simulated clock and a heap of future events.

    Pipelines that share a network link share an event loop. An event is a function called with its
    time and an argument, which takes less memory than a closure.

    Args:
        parent: Loop of which this one is a child (`make_child`); None for a loop on its own.
        check: Called now and then while events run; an error that it raises ends the run. None:
            nothing is called.
    """

    __slots__ = (
        "_check", "_children", "_heap", "_num_unchecked", "_numbers", "_until", "is_child", "now",
    )  # fmt: skip

    def __init__(
        self, parent: "EventLoop | None" = None, check: Callable[[], None] | None = None
    ) -> None:
        self._check = check
        self._num_unchecked = 0
        """Events since the last call of `check`."""
        self.now: float = 0.0 if parent is None else parent.now
        """Time of the present event in seconds."""
        self.is_child = parent is not None
        self._heap: list[Event] = []
        self._children: list[EventLoop] = []
        self._numbers: Iterator[int] = count() if parent is None else parent._numbers
        self._until = inf
        """Time up to which the present run goes."""

    def make_child(self) -> "EventLoop":
        """Return a child loop for events that are independent of those of its siblings.

        Before each event of this loop, the children run up to it, one after the other: many events
        in a row find what they need in the CPU's cache, where those of many engines in turns would
        not. The order within a child, and between a child and this loop, is that of a single heap.
        Events of a child push no event into another loop.
        """
        child = EventLoop(self, self._check)
        self._children.append(child)
        return child

    def push(self, time: float, rank: int, handle: Callable[[float, T], None], argument: T) -> None:
        """Schedule an event; its time is rounded to whole nanoseconds.

        Args:
            time: Time in seconds, not in the past.
            rank: Order among events at the same time; smaller ranks run first.
            handle: Function called with the time and the argument.
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
        self,
        items: Iterable[tuple[float, T]],
        rank: int,
        handle: Callable[[float, T], None],
        num_in_a_row: int = 1,
    ) -> None:
        """Add an event per item; only the next one is in the heap.

        Args:
            items: Times in seconds and arguments, sorted by time. May be a generator: only one item
                is in memory.
            rank: Order among events at one time.
            handle: Called with the time and the argument.
            num_in_a_row: Items that may happen before the children have run up to the first one.
                Above 1 only if `handle` reads nothing that events of children change.

        Raises:
            ValueError: The first time is in the past; `run` raises it for a later one.
        """
        iterator = iter(items)

        def push_next() -> None:
            for time, argument in iterator:
                self.push(time, rank, run_item, argument)
                return

        def run_item(now: float, argument: T) -> None:
            handle(now, argument)
            push_next()
            for _ in range(1, num_in_a_row):
                event = self.pop_next(run_item)
                if event is None:
                    return
                handle(*event)
                push_next()

        push_next()

    @property
    def is_empty(self) -> bool:
        """True if no event is left, apart from those of children."""
        return not self._heap

    def run(self, until: float = inf) -> float:
        """Run all events up to a time, also those that they push; return the time of the last.

        Python's garbage collector pauses: events make no reference cycles, and every full
        collection would visit all requests so far.

        Raises:
            ValueError: An event is due before the one that caused it.
        """
        self._until = until
        collects_garbage = gc.isenabled()
        gc.disable()
        try:
            self._run()
        finally:
            if collects_garbage:
                gc.enable()
        return self.now

    def _run(self) -> None:
        heap, children, until = self._heap, self._children, self._until
        while heap and heap[0][0] <= until:
            if children:
                self._run_children(heap[0])
                for child in children:
                    child.now = heap[0][0]
            time, _, _, handle, argument = heappop(heap)
            self.now = time
            handle(time, argument)
            self._num_unchecked += 1
            if self._num_unchecked >= CHECK_EVENTS:
                self._run_check()
        self._run_children((until, inf))
        self.now = max([self.now, *(child.now for child in children)])

    def pop_next(self, handle: Callable[[float, T], None]) -> tuple[float, T] | None:
        """Pop the next event of this run if it has this handle; advance the clock to its time.

        Returns:
            Its time and argument; None if the next event is another one.
        """
        if not self._heap or self._heap[0][3] != handle or self._heap[0][0] > self._until:
            return None
        self.now, _, _, _, argument = heappop(self._heap)
        return self.now, argument

    def _run_children(self, limit: Event | tuple[float, float]) -> None:
        """Run the events of the children that precede an event, or a time and a rank."""
        for child in self._children:
            child.run_before(limit)

    def _run_check(self) -> None:
        self._num_unchecked = 0
        if self._check is not None:
            self._check()

    def run_before(self, limit: Event | tuple[float, float]) -> None:
        """Run the events that precede an event, or a time and a rank, with all that they push."""
        heap = self._heap
        while heap and heap[0] < limit:
            time, _, _, handle, argument = heappop(heap)
            self.now = time
            handle(time, argument)
            self._num_unchecked += 1
            if self._num_unchecked >= CHECK_EVENTS:
                self._run_check()
