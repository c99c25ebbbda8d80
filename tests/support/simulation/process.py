"""Simulated processes."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.simulation.network import Connection


class Process:
    """A process: it may be slow, stopped, or dead."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.is_alive = True
        self.is_stopped = False
        self.slowness = 1.0
        self.machine = self
        """Process of the agent, or the head, of the machine; this one if there is no other."""
        self.connections: list[Connection] = []
        self._backlog: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def run(self, callback: Callable[..., object], *args: Any) -> None:
        """Call a function in this process: now, once it continues, or never."""
        if not self.is_alive:
            return
        if self.is_stopped:
            self._backlog.append((callback, args))
        else:
            callback(*args)

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> None:
        self.loop.call_later(delay * self.slowness, self.run, callback, *args)

    def stop(self) -> None:
        """Stop the process, as SIGSTOP does."""
        self.is_stopped = True

    def resume(self) -> None:
        """Continue a stopped process."""
        self.is_stopped = False
        while self._backlog and self.is_alive and not self.is_stopped:
            callback, args = self._backlog.popleft()
            callback(*args)

    def end(self, is_killed: bool) -> None:
        """End the process and its connections."""
        self.is_alive = False
        for connection in list(self.connections):
            connection.cut(self if is_killed else None)
