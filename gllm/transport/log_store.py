"""Rendezvous store of torch.distributed for two workers of different machines, in two logs.

Each worker writes its own log; data movers copy it to the other machine (rendezvous_log.py).
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import Store

from gllm.transport.base import EdgeClosedError
from gllm.transport.rendezvous_log import (
    VERDICT_KEY,
    LogReader,
    TransportVerdict,
    append_record,
    open_log,
)

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.0005, 0.05
"""First and largest sleep of a thread that waits for a key; the sleep doubles each time."""
_DEFAULT_TIMEOUT = timedelta(seconds=300)


class LogStore(Store):
    """Rendezvous store of torch.distributed for two workers on different machines.

    Each worker appends to its own log file, which the data movers copy to the other machine. A key
    is set by one of the workers; a counter is the sum of what both have added.
    """

    def __init__(
        self, own: int, peer: int, event: int, is_cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """Use the log files of an edge.

        Args:
            own: descriptor of this worker's log.
            peer: descriptor of the copy of the other worker's log.
            event: eventfd that tells the data mover that the own log has grown.
            is_cancelled: returns True once a wait for a key should end.
        """
        super().__init__()
        # Threads of NCCL use the store while its communicator exists.
        own, peer, event = duplicates = open_log(own), os.dup(peer), os.dup(event)
        weakref.finalize(self, _close_all, duplicates)
        self._own, self._event, self._is_cancelled = own, event, is_cancelled
        self._lock = threading.Lock()
        self._readers = LogReader(own), LogReader(peer)
        self._values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}
        self._wait_limit = _DEFAULT_TIMEOUT

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._append(f"={key}", value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        self.wait([key])
        with self._lock:
            return self._lookup(key) or b""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return its value, which may lack the other worker's latest part."""
        self._append(f"+{key}", str(amount).encode())
        with self._lock:
            self._read()
            return self._counters[key]

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""
        with self._lock:
            self._read()
            return all(self._lookup(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set.

        Raises:
            EdgeClosedError: the edge was cancelled.
            RuntimeError: they are not set in time.
        """
        limit = self._wait_limit if timeout is None else timeout
        pause, end = MIN_PAUSE_SECONDS, time.monotonic() + limit.total_seconds()
        while not self.check(keys):
            if self._is_cancelled():
                raise EdgeClosedError("the edge is closed")
            if time.monotonic() > end:
                raise RuntimeError(f"the other worker has not set {', '.join(keys)} in {limit}")
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of `wait` and `get`."""
        self._wait_limit = timeout

    def report(self, verdict: TransportVerdict) -> None:
        """Report to the data mover which transport this worker uses."""
        self._append(VERDICT_KEY, msgspec.msgpack.encode(verdict))

    def delete_key(self, key: str) -> bool:
        """Return False: keys are never deleted, because the other process may read them later."""
        return False

    def num_keys(self) -> int:
        """Return the number of keys."""
        with self._lock:
            self._read()
            return len(self._values) + len(self._counters)

    def _lookup(self, key: str) -> bytes | None:
        if key in self._values:
            return self._values[key]
        return str(self._counters[key]).encode() if key in self._counters else None

    def _append(self, key: str, value: bytes) -> None:
        with self._lock:
            append_record(self._own, key, value)
        os.eventfd_write(self._event, 1)

    def _read(self) -> None:
        for reader in self._readers:
            for key, value in reader.read():
                if key.startswith("="):
                    self._values[key[1:]] = value
                elif key.startswith("+"):
                    self._counters[key[1:]] = self._counters.get(key[1:], 0) + int(value)


def open_log_store(
    descriptors: list[int], is_cancelled: Callable[[], bool] = lambda: False
) -> LogStore:
    """Return the torch.distributed store for NCCL between two stages on different machines.

    Args:
        descriptors: file descriptors of the `Edge`.
        is_cancelled: returns True once a wait for a key should end.
    """
    own, peer, event = descriptors[2:5]
    return LogStore(own, peer, event, is_cancelled)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
