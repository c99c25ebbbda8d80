"""Ports for the processes that tests start."""

import os
import socket
from contextlib import suppress

FIRST = 20_000
"""Above the ports of Ray's workers."""
NUM_PORTS = 12_000
"""The last one is below the ports that Linux chooses for connections and for a bind to port 0."""
NUM_WORKERS = 8
"""Workers of pytest-xdist with ports of their own."""


class PortRange:
    """Ports of one process, handed out in turn."""

    def __init__(self, worker: int) -> None:
        self._size = NUM_PORTS // NUM_WORKERS
        self._first = FIRST + worker % NUM_WORKERS * self._size
        # Another run of the tests on this machine starts elsewhere.
        self._next = os.getpid() * 101 % self._size

    def pop(self, number: int) -> list[int]:
        """Return the next row of ports at which nothing listens."""
        for _ in range(self._size):
            if self._next + number > self._size:
                self._next = 0
            first = self._first + self._next
            self._next += number
            with suppress(OSError):
                for port in (row := list(range(first, first + number))):
                    with socket.socket() as probe:
                        probe.bind(("127.0.0.1", port))
                return row
        raise AssertionError("there are no free ports")


_ports = PortRange(int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")))


def free_port_row(number: int) -> list[int]:
    """Return consecutive ports at which nothing listens.

    Nobody else takes one of them before the process that it is for listens there, however long its
    start takes.
    """
    return _ports.pop(number)


def free_port() -> int:
    """Return a port at which nothing listens; see free_port_row."""
    return free_port_row(1)[0]


def free_ports(*names: str) -> dict[str, int]:
    """Return a port for each name; see free_port_row."""
    return dict(zip(names, free_port_row(len(names)), strict=True))
