"""Progress of a long command on standard error: a bar in a terminal, a few lines elsewhere."""

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from math import inf
from typing import Protocol, Self, cast

from tqdm import tqdm

MIN_SECONDS = 10.0
"""Least time between two lines: a command that takes no longer prints none."""
MAX_SECONDS = 60.0
"""Time after which the next unit prints a line, however little was done."""
REFRESH_SECONDS = 0.5
"""Least time between two refreshes of a bar."""
LINE_SHARE = 0.1
"""Share of the work between two lines otherwise."""


class ProgressBar(AbstractContextManager["ProgressBar"], Protocol):
    """Interface of a progress display for a long command, used as a context manager."""

    total: int | None
    """Number of units, if known. It may be set later."""

    def update(self, count: int = 1, /) -> None:
        """Add to the number of finished units."""

    def refresh(self) -> None:
        """Show that time passes while no unit ends; may be called often."""


class ProgressLines:
    """Progress display for logs and pipes, as lines such as `profile: 320 of 900, 41 s`.

    Args:
        name: Name of the work.
        total: Number of units of work; None if it is not known.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, name: str, total: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total = total
        self._name = name
        self._clock = clock
        self._begin = self._last_time = clock()
        self._num_done = self._last_done = 0

    def update(self, count: int = 1, /) -> None:
        """Add to the number of finished units, and print a line if one is due."""
        self._num_done += count
        now = self._clock()
        elapsed, done = now - self._last_time, self._num_done - self._last_done
        is_much = self.total is not None and done >= LINE_SHARE * self.total
        if elapsed >= (MIN_SECONDS if is_much else MAX_SECONDS):
            self._print(now)

    def refresh(self) -> None:
        """Print a line if the last one is some seconds ago, although no unit has ended."""
        now = self._clock()
        if now - self._last_time >= MIN_SECONDS:
            self._print(now)

    def _print(self, now: float) -> None:
        self._last_time, self._last_done = now, self._num_done
        of_total = "" if self.total is None else f" of {self.total}"
        line = f"{self._name}: {self._num_done}{of_total}, {now - self._begin:.0f} s"
        print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        """Return the bar."""
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: every line printed is complete."""


def print_above(line: str) -> None:
    """Print a line to standard error, above the bars of a terminal."""
    tqdm.write(line, file=sys.stderr)
    sys.stderr.flush()


def throttle(
    function: Callable[[], object],
    seconds: float = REFRESH_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[], None]:
    """Return a function that calls another one, and does nothing if it has done so just before.

    Args:
        function: Function to call.
        seconds: Least time between two calls.
        clock: Returns the time in seconds.
    """
    last = -inf

    def call() -> None:
        nonlocal last
        if clock() - last >= seconds:
            last = clock()
            function()

    return call


def show_progress(
    unit: str,
    total: int | None = None,
    name: str = "",
    *,
    stays: bool = True,
    is_shown: bool = True,
) -> ProgressBar:
    """Start a progress display on stderr: a bar in a terminal, lines elsewhere.

    Args:
        unit: Name of one unit of work.
        total: Number of units; None if it is not known yet.
        name: Name of the work; default: that of the unit.
        stays: Leave a finished bar in the terminal.
        is_shown: False shows nothing.
    """
    if is_shown and not sys.stderr.isatty():
        return ProgressLines(name or unit, total)
    bar = tqdm(total=total, desc=name or None, unit=unit, leave=stays, disable=not is_shown)
    return cast(ProgressBar, bar)
