"""Threads of which one runs at a time, in an order drawn from a seed.

For the hosts of several devices that wait for each other: what they do is as random as the seed and
as repeatable. Where none of them can go on, each one raises Stuck instead of waiting for ever.
"""

import random
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Stuck(AssertionError):
    """All threads wait for each other, or for one that has failed."""


class Turns:
    """Whose turn it is. Threads are numbered in the order of their works."""

    def __init__(self, seed: int, switches: float = 0.02) -> None:
        """switches: how often `maybe_switch` does."""
        self._random = random.Random(seed)
        self._switches = switches
        self._condition = threading.Condition()
        self._current = -1
        self._alive: set[int] = set()
        self._progress = 0
        self._stalled: dict[int, int] = {}
        """Value of `_progress` when each thread could not go on."""
        self._works: dict[int, Callable[[], bool]] = {}
        self._is_broken = False
        self._own = threading.local()

    def run(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """The results of all works, each done by a thread; the first error of one."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def run_one(number: int) -> None:
            self._own.number = number
            try:
                self._wait_for_turn()
                results[number] = works[number]()
            except BaseException as error:
                errors.append(error)
                self._is_broken = True
            finally:
                self._leave(number)

        self._alive = set(range(len(works)))
        threads = [threading.Thread(target=run_one, args=(each,)) for each in self._alive]
        for thread in threads:
            thread.start()
        with self._condition:
            self._give(self._random.choice(sorted(self._alive)))
        for thread in threads:
            thread.join()
        for error in sorted(errors, key=lambda error: isinstance(error, Stuck)):
            raise error
        return [results[number] for number in range(len(works))]

    def progress(self) -> None:
        """Something has happened that a stalled thread may wait for."""
        self._progress += 1

    def maybe_switch(self) -> None:
        """Another thread may go on first."""
        if self._random.random() < self._switches:
            self._pass(sorted(self._alive))

    def work_meanwhile(self, work: Callable[[], bool]) -> None:
        """`work` is what the thread's device does while its host waits; False if nothing."""
        self._works[self._own.number] = work

    def stall(self) -> None:
        """Let others go on; return when something may have happened. Raises Stuck."""
        if self._works.get(self._own.number, lambda: False)():
            return
        self._stalled[self._own.number] = self._progress
        able = [each for each in sorted(self._alive) if self._can_go_on(each)]
        if not able:
            self._is_broken = True
            raise Stuck("the ranks wait for each other")
        self._pass(able)

    def _can_go_on(self, number: int) -> bool:
        return self._stalled.get(number) != self._progress

    def _pass(self, able: Sequence[int]) -> None:
        with self._condition:
            self._give(self._random.choice(able))
        self._wait_for_turn()

    def _give(self, number: int) -> None:
        self._current = number
        self._condition.notify_all()

    def _wait_for_turn(self) -> None:
        with self._condition:
            arrived = self._condition.wait_for(
                lambda: self._current == self._own.number or self._is_broken, 120
            )
            if self._is_broken or not arrived:
                raise Stuck("another rank has failed")

    def _leave(self, number: int) -> None:
        with self._condition:
            self._alive.discard(number)
            self._progress += 1
            if self._alive:
                self._give(self._random.choice(sorted(self._alive)))
