"""An engine's KV mover with real gllm-link processes, and caches without an engine."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from gllm.messages.base import WireMessage
from gllm.messages.codec import decode_from_kv_mover, encode
from gllm.messages.kv_layout import KvLayout
from gllm.messages.kv_transfer import FetchKv, KvFetched, ServeKv
from gllm.recovery.placement import LOCAL_NODE
from gllm.runtime.head.kv_mover import EngineKvMover
from gllm.transport.descriptors import DescriptorChannel, DescriptorError
from gllm.transport.kv.pages import KvPages
from tests.support.engines.kv_layouts import cut_layouts

SECONDS = 60.0
BLOCKS, NUM_TOKENS = [2, 0, 3], 10


async def until(condition: Callable[[], Any]) -> Any:
    """Wait for a condition, and return its value."""
    async with asyncio.timeout(SECONDS):
        while not (value := condition()):
            await asyncio.sleep(0.01)
    return value


class KvWorkers:
    """Workers of one engine that only have caches, with the driver's end of the mover."""

    def __init__(
        self, pp: int = 1, tp: int = 1, backend: str | None = "auto", address: str = ""
    ) -> None:
        self.reports: list[WireMessage] = []
        """Messages to the driver of the present epoch."""
        self.epoch = 0
        """Number of the present epoch; 0 before the first one."""
        self.num_changes = 0
        self.layouts: list[KvLayout] = cut_layouts(pp, tp)
        self.pages: list[KvPages] = []
        self.mover = EngineKvMover(self._connect, backend, address=address)
        self.channel: DescriptorChannel | None = None
        """The driver's end of the channel to gllm-link; None while there is none."""
        self.mover.on_change = self._on_change

    def begin(self, num_shared: int | None = None) -> None:
        """Begin the next epoch; only `num_shared` of its workers have caches for transfers."""
        self.mover.end_epoch()
        self._disconnect()
        self.reports.clear()
        memory = {}
        self.pages = []
        for sender, layout in enumerate(self.layouts[:num_shared]):
            memory[sender] = os.memfd_create("cache")
            os.ftruncate(memory[sender], layout.num_bytes)
            self.pages.append(KvPages(layout, memory[sender]))
            self.mover.add_layout(sender, layout)
        self.epoch += 1
        self.mover.open(self.epoch, {LOCAL_NODE: range(len(self.layouts))}, memory)
        for descriptor in memory.values():
            os.close(descriptor)

    def send(self, command: Any) -> None:
        """Send a command as the driver does."""
        assert self.channel is not None
        self.channel.send(encode(command))

    def serve(self, ticket: int) -> None:
        """Fill blocks and serve them."""
        for pages in self.pages:
            slots = pages.find_slots(BLOCKS, 0, NUM_TOKENS)
            for layer in pages.layout.layers:
                run = pages.read(layer.layer, layer.heads, slots)
                run[:] = (np.arange(len(run)) + ticket + layer.layer) % 251
                pages.write(layer.layer, layer.heads, slots, run)
        self.send(ServeKv(ticket, NUM_TOKENS, BLOCKS))

    def fetch(self, number: int, ticket: int, endpoint: bytes) -> None:
        self.send(FetchKv(number, ticket, endpoint, 0, NUM_TOKENS, BLOCKS))

    async def ended(self, number: int) -> KvFetched:
        """Wait for the end of a fetch."""

        def find() -> list[KvFetched]:
            reports = [each for each in self.reports if isinstance(each, KvFetched)]
            return [each for each in reports if each.fetch == number]

        await until(find)
        (report,) = find()
        return report

    def read(self) -> list[bytes]:
        """Contents of the blocks."""
        slots = [pages.find_slots(BLOCKS, 0, NUM_TOKENS) for pages in self.pages]
        return [
            bytes(pages.read(layer.layer, layer.heads, each))
            for pages, each in zip(self.pages, slots, strict=True)
            for layer in pages.layout.layers
        ]

    def kill(self) -> None:
        """Kill gllm-link."""
        process_id = self.mover.process_id
        assert process_id is not None
        os.kill(process_id, 9)

    def close(self) -> None:
        """End gllm-link, and drop the maps, each of which has a descriptor."""
        self.mover.close()
        self._disconnect()
        self.pages.clear()

    def _connect(self, epoch: int, descriptor: int) -> None:
        assert epoch == self.epoch
        assert self.channel is None, "the channel of before has ended"
        self.channel = DescriptorChannel.from_descriptor(os.dup(descriptor))
        asyncio.get_running_loop().add_reader(self.channel.fileno(), self._read)

    def _read(self) -> None:
        assert self.channel is not None
        try:
            self.reports.append(decode_from_kv_mover(self.channel.receive()[0]))
        except (DescriptorError, OSError):
            self._disconnect()

    def _disconnect(self) -> None:
        if self.channel is not None:
            asyncio.get_running_loop().remove_reader(self.channel.fileno())
            self.channel.close()
            self.channel = None

    def _on_change(self) -> None:
        self.num_changes += 1
