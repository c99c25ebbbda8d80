"""Commands to other processes whose results a caller waits for."""

import asyncio
from collections.abc import Callable, Mapping
from itertools import count
from typing import Generic, TypeVar

from gllm.messages.base import WireMessage
from gllm.messages.lifecycle import CommandDone

Receiver = TypeVar("Receiver")


class CommandRunner(Generic[Receiver]):
    """Sends commands to workers or engines and waits until each has reported its result."""

    def __init__(self) -> None:
        self._ids = count()
        self._waiting: dict[int, dict[Receiver, asyncio.Future[str]]] = {}
        """Errors to come, by command id and receiver."""

    @property
    def num_running(self) -> int:
        """Number of commands that a caller waits for."""
        return len(self._waiting)

    async def run(
        self,
        create: Callable[[int], WireMessage],
        sends: Mapping[Receiver, Callable[[WireMessage], object]],
    ) -> dict[Receiver, str]:
        """Send a command and wait until every receiver has reported; return their errors.

        Args:
            create: creates the command with an id.
            sends: functions that send to the receivers.
        """
        command_id = next(self._ids)
        command = create(command_id)
        loop = asyncio.get_running_loop()
        futures = self._waiting[command_id] = {receiver: loop.create_future() for receiver in sends}
        try:
            for send in sends.values():
                send(command)
            errors = {receiver: await future for receiver, future in futures.items()}
        finally:
            del self._waiting[command_id]
        return {receiver: error for receiver, error in errors.items() if error}

    def on_done(self, receiver: Receiver, report: CommandDone) -> None:
        """Handle a receiver's report; a report on a command that no task waits for is ignored."""
        futures = self._waiting.get(report.command_id, {})
        if receiver in futures:
            _complete(futures[receiver], report.error)

    def on_lost(self, receiver: Receiver, cause: str) -> None:
        """End the commands of a receiver that is lost with an error."""
        for futures in self._waiting.values():
            if receiver in futures:
                _complete(futures[receiver], cause)

    def fail_all(self, cause: str) -> None:
        """End all commands with an error."""
        for futures in self._waiting.values():
            for future in futures.values():
                _complete(future, cause)


def _complete(future: asyncio.Future[str], error: str) -> None:
    if not future.done():
        future.set_result(error)
