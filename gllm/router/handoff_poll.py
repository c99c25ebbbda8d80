"""Wait for the readers of first tokens, which decide whether a hand-off goes on."""

import asyncio

from gllm.router.client import FleetClient

READ_POLL_SECONDS = 0.002
"""Interval at which readers are looked at. A reader that waits in a task needs a few turns of the
event loop to read; one that does not read in time is no longer waited for."""


class HandoffPoll:
    """Lets a client's hand-offs go on once their readers have read token 1."""

    def __init__(self, client: FleetClient) -> None:
        self._client = client
        self._next: asyncio.TimerHandle | None = None

    def on_outputs(self) -> None:
        """Look at the readers soon if one of them has not read yet."""
        if self._next is None and self._client.handoffs.has_unread:
            loop = asyncio.get_running_loop()
            self._next = loop.call_later(READ_POLL_SECONDS, self._poll)

    def on_tick(self) -> None:
        """Act on deadlines of hand-offs."""
        if self._client.handoffs.num_running:
            self._client.continue_handoffs()

    def close(self) -> None:
        """Look at no reader any more."""
        if self._next is not None:
            self._next.cancel()

    def _poll(self) -> None:
        self._next = None
        self._client.continue_handoffs()
        self.on_outputs()
