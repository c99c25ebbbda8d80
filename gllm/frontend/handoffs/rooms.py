"""Rooms: where the engine that decodes waits for the grant of the one that prefills.

A router of SGLang sends a request to both engines at the same time and names a room, a random
number. The prefill engine opens the room and publishes a grant in it; the decode engine asks for
the grant.
"""

import asyncio
from dataclasses import dataclass, field

OPEN_SECONDS = 5.0
"""Time for which a decode engine waits until the prefill engine has got its half of the request."""
GRANT_SECONDS = 60.0
"""Time for which it waits for the end of the prefill then."""
KEEP_SECONDS = 30.0
"""Time for which a grant is kept: as long as the lease of the KV blocks."""
MAX_ROOMS = 4096
"""Most rooms at a time; requests of further ones are computed without a hand-off."""


@dataclass
class _Room:
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the prefill engine has its half of the request."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the prefill has ended."""
    grant: str = ""
    """Empty if the KV blocks are not held."""
    num_waiting: int = 0


class RoomTable:
    """Rooms of one prefill engine."""

    def __init__(
        self,
        open_seconds: float = OPEN_SECONDS,
        grant_seconds: float = GRANT_SECONDS,
        keep_seconds: float = KEEP_SECONDS,
    ) -> None:
        self._open_seconds = open_seconds
        self._grant_seconds = grant_seconds
        self._keep_seconds = keep_seconds
        self._rooms: dict[int, _Room] = {}

    def __len__(self) -> int:
        """Return the number of rooms."""
        return len(self._rooms)

    def open(self, number: int) -> bool:
        """Open a room for a prefill; return False if it is in use, or if there are too many."""
        room = self._rooms.get(number)
        if room is None or room.closed.is_set():
            room = self._add(number)
        if room is None or room.opened.is_set():
            return False
        room.opened.set()
        return True

    def publish(self, number: int, grant: str) -> None:
        """End the prefill of a room.

        Args:
            number: of a room that `open` has opened.
            grant: of the held blocks; empty if there are none.
        """
        room = self._rooms[number]
        room.grant = grant
        room.closed.set()
        # Also without a grant, so that the decode engine computes the prompt at once.
        asyncio.get_running_loop().call_later(self._keep_seconds, self._forget, number, room)

    async def wait(self, number: int) -> str:
        """Return the grant of a room; empty if there is none in time."""
        room = self._rooms.get(number) or self._add(number)
        if room is None:
            return ""
        room.num_waiting += 1
        try:
            async with asyncio.timeout(self._open_seconds):
                await room.opened.wait()
            async with asyncio.timeout(self._grant_seconds):
                await room.closed.wait()
        except TimeoutError:
            return ""
        finally:
            room.num_waiting -= 1
            # A grant is used once, and a room that nobody has opened is not kept.
            if not room.num_waiting and room.opened.is_set() == room.closed.is_set():
                self._forget(number, room)
        return room.grant

    def _add(self, number: int) -> _Room | None:
        if len(self._rooms) >= MAX_ROOMS:
            return None
        room = self._rooms[number] = _Room()
        return room

    def _forget(self, number: int, room: _Room) -> None:
        if self._rooms.get(number) is room:
            del self._rooms[number]
