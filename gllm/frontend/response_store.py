"""Store of the Responses API in memory: responses that later requests refer to by id.

Bounded in bytes and in time. Each client sees its own responses alone. Time is an argument.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

Item = dict[str, Any]
"""An input or output item of the Responses API."""
TURN_BYTES = 1024
"""Bytes that a turn is counted as beside its JSON."""
ITEM_BYTES = 256
"""Bytes that an id of an item is counted as beside the JSON."""


class _Output(msgspec.Struct):
    """The part of a response that later requests continue."""

    output: list[Item]


class NotStoredError(Exception):
    """No response or item of this id is stored for the client."""


class StoredResponse(NamedTuple):
    """A response and the items that its request added to the conversation, as JSON."""

    response: bytes
    input_items: bytes


@dataclass(eq=False)
class _Turn:
    """A stored response, the items of its request, and the response that the request continued."""

    owner: str
    response_id: str
    stored: StoredResponse
    item_ids: tuple[str, ...]
    previous: "_Turn | None"
    expires_at: float
    num_references: int = 1
    """The turns that continue this one, and the table of turns while it has this one."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the turn is counted as."""
        num_bytes = len(self.stored.response) + len(self.stored.input_items)
        return num_bytes + TURN_BYTES + len(self.item_ids) * ITEM_BYTES

    def items(self) -> list[Item]:
        """Return the items of the request, then those of the response."""
        items: list[Item] = msgspec.json.decode(self.stored.input_items)
        return items + msgspec.json.decode(self.stored.response, type=_Output).output


class ResponseStore:
    """Stores responses by client and id, up to a number of bytes and a time after their last use.

    A conversation is a chain of turns, each of which has its own items alone. A turn stays in
    memory while one that continues it is stored. If memory is short, the client with the most bytes
    loses the turn that it has not used for the longest time. Any thread may call the methods.

    Args:
        max_bytes: Largest number of bytes of all clients together; 0 stores nothing.
        ttl_seconds: Time for which a response is stored after its last use.
    """

    def __init__(self, max_bytes: int, ttl_seconds: float) -> None:
        self._max_bytes = max_bytes
        self._ttl_seconds = ttl_seconds
        self._lock = threading.Lock()
        self._turns: dict[str, OrderedDict[str, _Turn]] = {}
        """Turns by client and id of the response, the least recently used first."""
        self._items: dict[tuple[str, str], _Turn] = {}
        """Turns by client and id of an item."""
        self._bytes: dict[str, int] = {}
        """Bytes by client, with turns that are only continued."""

    @property
    def is_enabled(self) -> bool:
        """True if responses are stored."""
        return self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all clients."""
        return sum(self._bytes.values())

    def add(
        self,
        owner: str,
        response_id: str,
        stored: StoredResponse,
        item_ids: Iterable[str],
        previous_id: str | None,
        now: float,
    ) -> bool:
        """Store a response in place of one of the same id; return False if it is too large.

        Args:
            owner: The client.
            response_id: Id of the response.
            stored: The response and the items of its request.
            item_ids: Ids of items of both, by which later requests may refer to them.
            previous_id: Id of the response that the request continued; if it is no longer stored,
                neither is this one.
            now: The time in seconds.
        """
        with self._lock:
            previous = None
            if previous_id is not None:
                previous = self._turns.get(owner, OrderedDict()).get(previous_id)
                if previous is None:
                    return False
            turn = _Turn(
                owner, response_id, stored, tuple(item_ids), previous, now + self._ttl_seconds
            )
            if turn.num_bytes > self._max_bytes:
                return False
            if previous is not None:
                previous.num_references += 1
            if response_id in self._turns.get(owner, {}):
                self._forget(self._turns[owner][response_id])
            self._turns.setdefault(owner, OrderedDict())[response_id] = turn
            self._bytes[owner] = self._bytes.get(owner, 0) + turn.num_bytes
            for item_id in turn.item_ids:
                self._items[owner, item_id] = turn
            self._expire(now)
            while self.num_bytes > self._max_bytes:
                largest = max(self._turns, key=lambda name: self._bytes[name])
                self._forget(next(iter(self._turns[largest].values())))
            return response_id in self._turns.get(owner, {})

    def get(self, owner: str, response_id: str, now: float) -> StoredResponse:
        """Return a stored response. Raises NotStoredError."""
        with self._lock:
            return self._use(owner, response_id, now).stored

    def get_conversation(self, owner: str, response_id: str, now: float) -> list[Item]:
        """Return the items of a conversation up to a response. Raises NotStoredError."""
        turns: list[_Turn] = []
        with self._lock:
            turn: _Turn | None = self._use(owner, response_id, now)
            while turn is not None:
                turns.append(turn)
                turn = turn.previous
        return [item for turn in reversed(turns) for item in turn.items()]

    def get_items(self, owner: str, item_ids: Collection[str], now: float) -> dict[str, Item]:
        """Return those items of several ids that are stored, by id."""
        with self._lock:
            self._expire(now)
            found = {self._items.get((owner, item_id)) for item_id in item_ids}
        items = [item for turn in found if turn is not None for item in turn.items()]
        named = {item["id"]: item for item in items if isinstance(item.get("id"), str)}
        return {item_id: named[item_id] for item_id in item_ids if item_id in named}

    def remove(self, owner: str, response_id: str, now: float) -> None:
        """Remove a response; those that continue it stay. Raises NotStoredError."""
        with self._lock:
            self._forget(self._use(owner, response_id, now))

    def _use(self, owner: str, response_id: str, now: float) -> _Turn:
        """Return a turn, which becomes the most recently used one. Raises NotStoredError."""
        self._expire(now)
        turns = self._turns.get(owner, OrderedDict())
        if response_id not in turns:
            raise NotStoredError
        turns.move_to_end(response_id)
        turn = turns[response_id]
        turn.expires_at = now + self._ttl_seconds
        return turn

    def _expire(self, now: float) -> None:
        """Remove turns that have not been used for the time to live."""
        for owner in list(self._turns):
            while owner in self._turns:
                oldest = next(iter(self._turns[owner].values()))
                if oldest.expires_at > now:
                    break
                self._forget(oldest)

    def _forget(self, turn: _Turn) -> None:
        """Remove a turn from the table, and free those that nothing refers to any more."""
        turns = self._turns[turn.owner]
        del turns[turn.response_id]
        if not turns:
            del self._turns[turn.owner]
        freed: _Turn | None = turn
        while freed is not None:
            freed.num_references -= 1
            if freed.num_references:
                return
            self._bytes[freed.owner] -= freed.num_bytes
            if not self._bytes[freed.owner]:
                del self._bytes[freed.owner]
            for item_id in freed.item_ids:
                if self._items.get((freed.owner, item_id)) is freed:
                    del self._items[freed.owner, item_id]
            freed = freed.previous
