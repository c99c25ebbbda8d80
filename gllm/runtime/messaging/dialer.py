"""Attempts to keep one session with a peer."""

import asyncio
import logging
import time
from collections.abc import Callable

from gllm.runtime.messaging.backoff import Backoff
from gllm.runtime.messaging.connection import PeerConnection
from gllm.runtime.messaging.host_names import Resolve
from gllm.runtime.messaging.link_config import parse_host_port

log = logging.getLogger(__name__)

LOG_SECONDS = 60.0
"""Time between two log lines about a peer that cannot be reached."""

Dial = Callable[[str, int, Callable[[str, bool], None]], PeerConnection]
"""Begins a session with a numeric HOST:PORT after a number of failures in a row; calls the function
when it ends, with the cause and whether one end refused it."""


class Dialer:
    """Dials one address again and again, with growing delays, while no session exists."""

    def __init__(self, address: str, dial: Dial, resolve: Resolve, backoff: Backoff) -> None:
        """Create a dialer that has not started.

        Args:
            address: HOST:PORT; the host is resolved before each attempt.
            dial: begins a session.
            resolve: resolution of host names.
            backoff: delays between the attempts.
        """
        self._address = address
        self._host, self._port = parse_host_port(address)
        self._dial = dial
        self._resolve = resolve
        self._backoff = backoff
        self.is_wanted = True
        """False to dial no more once the session has ended."""
        self._num_failures = 0
        """Attempts since the last session that was established."""
        self._last_log = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to dial, on the running event loop."""
        self._task = asyncio.create_task(self._run())

    @property
    def has_ended(self) -> bool:
        """True if this dialer does not dial any more."""
        return self._task is None or self._task.done()

    async def stop(self) -> None:
        """Dial no more; a session goes on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while self.is_wanted:
            connection, cause, is_refused = await self._attempt()
            if connection is not None and connection.is_established:
                self._backoff.reset()
                self._num_failures = 0
                self._last_log = float("-inf")
            else:
                self._num_failures += 1
                if not is_refused:
                    self._log_failure(cause)
            if self.is_wanted:
                backoff = self._backoff
                delay = backoff.refused_delay() if is_refused else backoff.next_delay()
                await asyncio.sleep(delay)

    async def _attempt(self) -> tuple[PeerConnection | None, str, bool]:
        """Dial once and wait until the session ends; return it, the cause, whether it was refused.

        There is none if the address cannot be used.
        """
        ended: asyncio.Future[tuple[str, bool]] = asyncio.get_running_loop().create_future()

        def on_end(cause: str, is_refused: bool) -> None:
            if not ended.done():
                ended.set_result((cause, is_refused))

        try:
            addresses = await self._resolve(self._host, self._port)
            # A host with several addresses may listen on one of them only.
            address = addresses[self._num_failures % len(addresses)]
            connection = self._dial(address, self._num_failures // len(addresses), on_end)
        except (OSError, ValueError) as error:
            return None, str(error), False
        cause, is_refused = await ended
        return connection, cause, is_refused

    def _log_failure(self, cause: str) -> None:
        """Log that there is no session, at most once a minute above the level of debugging."""
        now = time.monotonic()
        level = logging.DEBUG
        if now - self._last_log >= LOG_SECONDS:
            self._last_log = now
            level = logging.WARNING
        log.log(level, "no session with %s: %s; trying again", self._address, cause)
