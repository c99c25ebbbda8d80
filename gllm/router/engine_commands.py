"""Commands of a router to its engines whose results a caller waits for."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count

from gllm.messages.base import WireMessage
from gllm.messages.control import CommandDone
from gllm.runtime.messaging.engine_link import EngineLink


class EngineCommands:
    """Sends a command to engines and waits until each has reported the result or is lost."""

    def __init__(self) -> None:
        self._ids = count()
        self._waiting: dict[int, dict[str, asyncio.Future[str]]] = {}
        """Errors to come, by command id and engine."""

    async def run(self, create: Callable[[int], WireMessage], links: Sequence[EngineLink]) -> str:
        """Send a command, created with an id, to engines; return the first error, empty if none."""
        command_id = next(self._ids)
        command = create(command_id)
        loop = asyncio.get_running_loop()
        futures = {link.name: loop.create_future() for link in links}
        self._waiting[command_id] = futures
        try:
            for link in links:
                link.send(command)
            errors = [
                f"engine {name}: {error}" for name in futures if (error := await futures[name])
            ]
        finally:
            del self._waiting[command_id]
        return next(iter(errors), "")

    def on_done(self, engine: str, report: CommandDone) -> None:
        """Handle an engine's report."""
        future = self._waiting.get(report.command_id, {}).get(engine)
        if future is not None and not future.done():
            future.set_result(report.error)

    def on_lost(self, engine: str, cause: str) -> None:
        """End the commands of an engine with an error."""
        for futures in self._waiting.values():
            if engine in futures and not futures[engine].done():
                futures[engine].set_result(cause)

    def fail_all(self, cause: str) -> None:
        """End all commands with an error."""
        for futures in self._waiting.values():
            for future in futures.values():
                if not future.done():
                    future.set_result(cause)
