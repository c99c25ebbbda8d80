"""Commands to the workers whose results a caller waits for."""

import asyncio
from collections.abc import Callable
from itertools import count

from gllm.messages.base import WireMessage
from gllm.messages.control import CommandDone
from gllm.runtime.head.worker_channels import WorkerChannels


class CommandRunner:
    """Sends commands and waits until every receiver has reported the result."""

    def __init__(self) -> None:
        self._ids = count()
        self._reports: dict[int, tuple[asyncio.Queue[CommandDone], list[int]]] = {}
        """Reports on the commands that a caller waits for and their receivers, by command id."""

    @property
    def num_running(self) -> int:
        """Commands that a caller waits for."""
        return len(self._reports)

    async def run(
        self, create: Callable[[int], WireMessage], channels: WorkerChannels, receivers: list[int]
    ) -> str:
        """Send a command and wait for all receivers.

        Args:
            create: creates the command with an id.
            channels: to the receivers.
            receivers: senders of the workers.

        Returns:
            The first error, empty on success.
        """
        command_id = next(self._ids)
        command = create(command_id)
        queue: asyncio.Queue[CommandDone] = asyncio.Queue()
        self._reports[command_id] = queue, receivers
        try:
            for receiver in receivers:
                channels.send(receiver, command)
            reports = [await queue.get() for _ in receivers]
        finally:
            del self._reports[command_id]
        return next((report.error for report in reports if report.error), "")

    def on_done(self, report: CommandDone) -> None:
        """Handle a worker's report."""
        if report.command_id in self._reports:
            self._reports[report.command_id][0].put_nowait(report)

    def fail_all(self, cause: str) -> None:
        """End all commands with an error, because a worker has died."""
        for command_id, (queue, receivers) in self._reports.items():
            for _ in receivers:
                queue.put_nowait(CommandDone(command_id, 0, cause))
