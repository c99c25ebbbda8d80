"""Deadline and cancellation of fetches by any backend, and the end of a mover that keeps neither.

A backend has to end a fetch soon after `FetchTarget.check` raises an error. One that cannot,
because a device or a library still writes, must not be left behind: its blocks are in use for ever.
Then the process ends, which ends all writes, and its parent starts another one.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from gllm.transport.kv.backends.base import FetchTarget, KvBackend, ServedRead
from gllm.transport.kv.frames import KvConnection, KvTransferError

CHECK_SECONDS = 0.5
"""Interval between two checks of the running fetches."""
MAX_LATE_CHECKS = 10
"""Checks at which a fetch that has to end may still run. They are counted, not timed, so that a
process that was suspended does not end."""


class FetchWatch:
    """Finds fetches that go on although they were cancelled or are late. Without threads or time.

    The caller serializes the calls.
    """

    def __init__(self) -> None:
        """Create without fetches."""
        self._checks: dict[int, Callable[[], None]] = {}
        self._num_late: dict[int, int] = {}
        """Checks at which a fetch had to end, by its number."""
        self._numbers = count()

    def __len__(self) -> int:
        """Return the number of running fetches."""
        return len(self._checks)

    def add(self, check: Callable[[], None]) -> int:
        """Watch a fetch; return its number. `check` raises KvTransferError if it has to end."""
        number = next(self._numbers)
        self._checks[number] = check
        return number

    def remove(self, number: int) -> None:
        """Note the end of a fetch."""
        del self._checks[number]
        self._num_late.pop(number, None)

    def find_stuck(self) -> str:
        """Return why a fetch had to end long ago; empty if none had. Called at intervals."""
        for number, check in self._checks.items():
            try:
                check()
            except KvTransferError as error:
                self._num_late[number] = self._num_late.get(number, 0) + 1
                if self._num_late[number] > MAX_LATE_CHECKS:
                    return str(error)
        return ""


class FetchSupervisor:
    """Thread that watches the fetches of a mover while there are any."""

    def __init__(
        self, on_stuck: Callable[[str], None], check_seconds: float = CHECK_SECONDS
    ) -> None:
        """Create without fetches.

        Args:
            on_stuck: Called once, with the cause for which a fetch had to end and did not.
            check_seconds: Interval between two checks.
        """
        self._on_stuck, self._check_seconds = on_stuck, check_seconds
        self._watch = FetchWatch()
        self._changed = threading.Condition()
        self._is_started = self._is_closed = False

    @contextmanager
    def watching(self, check: Callable[[], None]) -> Iterator[None]:
        """Watch a fetch while the context is open."""
        with self._changed:
            number = self._watch.add(check)
            if not self._is_started:
                self._is_started = True
                threading.Thread(target=self._run, name="kv-deadlines", daemon=True).start()
            if len(self._watch) == 1:
                # Further ones must neither delay the next check nor add one.
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._watch.remove(number)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._is_closed:
                is_due = not self._changed.wait(self._check_seconds if len(self._watch) else None)
                if is_due and (cause := self._watch.find_stuck()):
                    break
            else:
                return
        self._on_stuck(cause)


class BoundedBackend:
    """KV transfer backend whose fetches are watched, around any other backend."""

    def __init__(self, inner: KvBackend, supervisor: FetchSupervisor) -> None:
        """Wrap a backend."""
        self._inner, self._supervisor = inner, supervisor

    def serve(self, connection: KvConnection, read: ServedRead) -> None:
        """Send the blocks as the inner backend does."""
        self._inner.serve(connection, read)

    def fetch(self, connection: KvConnection, target: FetchTarget) -> None:
        """Receive the blocks as the inner backend does, under the deadline of the fetch."""
        with self._supervisor.watching(target.check):
            self._inner.fetch(connection, target)
