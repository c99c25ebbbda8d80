"""Collectives of the ranks of a simulated stage: each waits for all, and ends when one cancels."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.support.simulation.clock import VirtualLoop
from tests.support.simulation.process import Process

OnParts = Callable[[list[Any]], None]
"""Called with the parts of all ranks, in the order of the ranks."""


@dataclass
class Wait:
    """A rank in a collective."""

    process: Process
    part: Any
    on_parts: OnParts
    on_closed: Callable[[], None]


@dataclass
class Collective:
    """One collective of a group."""

    kind: tuple[Any, ...]
    waits: dict[int, Wait] = field(default_factory=dict)
    """By rank."""


class RankGroup:
    """Group of a stage's ranks in one epoch; all call the same collectives in order."""

    def __init__(self, loop: VirtualLoop, rng: Random, size: int) -> None:
        self.size = size
        self.num_collectives = 0
        """Collectives that all ranks have reached."""
        self._loop, self._rng = loop, rng
        self._is_cancelled = False
        self._num_reached = [0] * size
        """Collectives that each rank has reached."""
        self._collectives: dict[int, Collective] = {}
        """Those that some rank has not reached, by number."""

    def exchange(self, rank: int, kind: tuple[Any, ...], wait: Wait) -> None:
        """Wait for the same collective of all other ranks.

        Args:
            rank: that calls.
            kind: name and step of the collective, equal on all ranks.
            wait: process of the rank, its part, and functions to be called at the end.
        """
        number = self._num_reached[rank]
        self._num_reached[rank] += 1
        if self._is_cancelled:
            self._call_soon(wait.process, wait.on_closed)
            return
        collective = self._collectives.setdefault(number, Collective(kind))
        assert collective.kind == kind, f"ranks disagree: {collective.kind} and {kind}"
        collective.waits[rank] = wait
        if len(collective.waits) < self.size:
            return
        del self._collectives[number]
        self.num_collectives += 1
        parts = [collective.waits[each].part for each in range(self.size)]
        for each in collective.waits.values():
            self._call_soon(each.process, each.on_parts, parts)

    def cancel(self) -> None:
        """End all collectives, now and later."""
        self._is_cancelled = True
        collectives, self._collectives = self._collectives, {}
        for collective in collectives.values():
            for wait in collective.waits.values():
                self._call_soon(wait.process, wait.on_closed)

    def _call_soon(self, process: Process, callback: Callable[..., None], *args: Any) -> None:
        self._loop.call_later(self._rng.uniform(0.0, 0.0001), process.run, callback, *args)
