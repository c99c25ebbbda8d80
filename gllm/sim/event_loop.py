"""Simulated time: a heap of things to happen.

Owns order: by time, then rank, then who came first. Knows nothing of what happens.
"""

import heapq
from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple


class SimulationEvent(NamedTuple):
    """A call at a time. Of two at one time the smaller rank goes first."""

    time: float
    rank: int
    handle: Callable[[float], Iterable["SimulationEvent"]]
    """Takes the time and returns what follows from it, none of it in the past."""


def run_events(events: Iterable[SimulationEvent], until: float = float("inf")) -> float:
    """Let the events and all that follow happen, up to a time; the time of the last one.

    Raises ValueError for an event that lies before the one that caused it.
    """
    heap: list[tuple[float, int, int, Callable[[float], Iterable[SimulationEvent]]]] = []
    order = count()
    for event in events:
        heapq.heappush(heap, (event.time, event.rank, next(order), event.handle))
    now = 0.0
    while heap and heap[0][0] <= until:
        now, _, _, handle = heapq.heappop(heap)
        for event in handle(now):
            if event.time < now:
                raise ValueError(f"an event at {event.time} s came up at {now} s")
            heapq.heappush(heap, (event.time, event.rank, next(order), event.handle))
    return now
