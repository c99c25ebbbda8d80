"""An asyncio event loop on a virtual clock: time passes when nothing else is left to do."""

import asyncio
import selectors
import socket
from collections.abc import Callable
from typing import Any


class StalledError(AssertionError):
    """Nothing is left to happen, but somebody waits."""


class VirtualSelector(selectors.SelectSelector):
    """Selector that advances the clock instead of waiting; no descriptor becomes ready."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise StalledError("no event and no timer is left")
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose time is that of its selector; it counts its callbacks."""

    def __init__(self) -> None:
        self.selector = VirtualSelector()
        super().__init__(self.selector)
        self.num_events = 0
        self.errors: list[BaseException] = []
        """Errors of callbacks and tasks that nobody handled."""
        self.set_exception_handler(self._on_error)

    def time(self) -> float:
        return self.selector.now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        self.num_events += 1
        return super().call_at(when, callback, *args, context=context)

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        self.num_events += 1
        return super().call_soon(callback, *args, context=context)

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        """Return the numeric address itself: nothing else is resolved."""
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port))]

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Call a function at once: a thread would run beside the virtual clock."""
        future = self.create_future()
        future.set_result(function(*args))
        return future

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(context.get("exception") or RuntimeError(context["message"]))
