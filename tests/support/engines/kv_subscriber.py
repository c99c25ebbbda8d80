"""A subscriber of published KV cache events, written from the format alone."""

import asyncio
import time
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio


class Subscriber:
    """The blocks of an engine by its events: parent, tokens and salt of each hash."""

    def __init__(self, context: zmq.asyncio.Context, topic: str, block_size: int) -> None:
        self.blocks: dict[int, tuple[int | None, list[int], str]] = {}
        self.numbers: list[int] = []
        """Numbers of the batches."""
        self.num_cleared = 0
        self._topic = topic
        self._block_size = block_size
        self._socket = context.socket(zmq.SUB)
        self._socket.subscribe(topic.encode())

    def connect(self, address: str) -> None:
        """Subscribe at an engine."""
        self._socket.connect(address)

    def bind(self) -> str:
        """Wait for engines that connect; return the address."""
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        return f"tcp://127.0.0.1:{port}"

    async def read(self) -> None:
        """Read one batch."""
        topic, number, payload = await self._socket.recv_multipart()
        assert topic.decode() == self._topic
        assert len(number) == 8
        self.apply(int.from_bytes(number, "big"), payload)

    def apply(self, number: int, payload: bytes) -> None:
        """Apply a batch."""
        self.numbers.append(number)
        timestamp, events, rank = msgspec.msgpack.decode(payload)
        # Seconds since 1970: those of a replay may be as old as the test.
        assert abs(timestamp - time.time()) < 3600
        assert rank == 0
        handlers: dict[str, Callable[..., None]] = {
            "BlockStored": self._store,
            "BlockRemoved": self._remove,
            "AllBlocksCleared": self._clear,
        }
        for name, *fields in events:
            handlers[name](*fields)

    def _store(
        self,
        hashes: list[int],
        parent: int | None,
        token_ids: list[int],
        block_size: int,
        lora_id: object,
        medium: str,
        lora_name: object,
        extra_keys: list[list[str] | None],
    ) -> None:
        assert (block_size, lora_id, medium, lora_name) == (self._block_size, None, "GPU", None)
        assert len(token_ids) == block_size * len(hashes)
        assert len(extra_keys) == len(hashes)
        for index, digest in enumerate(hashes):
            assert 0 <= digest < 2**64
            tokens = token_ids[index * block_size : (index + 1) * block_size]
            keys = extra_keys[index]
            assert keys is None or parent is None
            self.blocks[digest] = parent, tokens, keys[0] if keys else ""
            parent = digest

    def _remove(self, hashes: list[int], medium: str) -> None:
        assert medium == "GPU"
        for digest in hashes:
            del self.blocks[digest]

    def _clear(self) -> None:
        self.num_cleared += 1
        self.blocks.clear()

    def prefixes(self) -> set[tuple[str, tuple[int, ...]]]:
        """Salt and tokens of each chain, from the beginning of a prompt to each block."""
        return {self._prefix(digest) for digest in self.blocks}

    def _prefix(self, digest: int) -> tuple[str, tuple[int, ...]]:
        parent, tokens, salt = self.blocks[digest]
        if parent is None:
            return salt, tuple(tokens)
        salt, before = self._prefix(parent)
        return salt, (*before, *tokens)


async def request_replay(address: str, *frames: bytes) -> list[tuple[int, bytes]]:
    """Return numbers and payloads of a replay, without its end."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    batches: list[tuple[int, bytes]] = []
    try:
        await socket.send_multipart([b"", *frames])
        async with asyncio.timeout(20):
            while True:
                empty, number, payload = await socket.recv_multipart()
                assert not empty
                if int.from_bytes(number, "big", signed=True) == -1:
                    assert not payload
                    return batches
                batches.append((int.from_bytes(number, "big"), payload))
    finally:
        context.destroy(linger=0)
