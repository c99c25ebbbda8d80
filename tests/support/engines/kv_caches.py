"""Engines without a model: caches in memfds and a mover, with contents that are known."""

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from gllm.config.sized_folder import SizedFolder
from gllm.messages.kv_layout import KvLayout
from gllm.messages.kv_transfer import (
    FetchKv,
    KvFetched,
    KvReport,
    ServeKv,
)
from gllm.transport.kv.endpoint import KvEndpoint, KvMachine, decode_endpoint, encode_endpoint
from gllm.transport.kv.mover import KvMover
from gllm.transport.kv.pages import Bytes, KvPages
from gllm.transport.kv.progress import LayerProgress

Report = TypeVar("Report", bound=KvReport)
NUM_LAYERS, NUM_HEADS, KEY_BYTES, VALUE_BYTES = 4, 2, 8, 8
WAIT_SECONDS = 20.0


def make_contents(num_tokens: int, seed: int) -> Bytes:
    """Return keys and values, uint8 [layers, heads, tokens, key and value bytes]."""
    shape = NUM_LAYERS, NUM_HEADS, num_tokens, KEY_BYTES + VALUE_BYTES
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def join_endpoints(endpoints: Sequence[bytes]) -> bytes:
    """Return the endpoint of an engine whose machines have the given ones."""
    machines = [machine for each in endpoints for machine in decode_endpoint(each).machines]
    return encode_endpoint(KvEndpoint(machines))


class CachedEngine:
    """Mover with the KV caches of an engine's workers."""

    def __init__(
        self,
        layouts: list[KvLayout],
        backend: str = "auto",
        encoding: str = "plain",
        dial: Callable[[KvMachine], socket.socket] | None = None,
        yield_to_activations: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        counts_layers: bool = False,
        engine: Sequence[Sequence[KvLayout]] = (),
        machine: int = 0,
        disk: SizedFolder | None = None,
        **options: Any,
    ) -> None:
        """`engine` and `machine` are those of an engine on several machines, `disk` its disk tier,
        `options` further ones of KvMover."""
        self.reports: queue.Queue[KvReport] = queue.Queue()
        self.mover = KvMover(
            lambda epoch, report: self.reports.put(report),
            backend,
            encoding,
            dial,
            yield_to_activations,
            clock,
            sleep,
            **options,
        )
        descriptors = [os.memfd_create("cache") for _ in layouts]
        for descriptor, layout in zip(descriptors, layouts, strict=True):
            os.ftruncate(descriptor, layout.num_bytes)
        self.pages = [
            KvPages(layout, descriptor)
            for layout, descriptor in zip(layouts, descriptors, strict=True)
        ]
        self.progress = [
            LayerProgress(descriptor, layout, is_writable=True)
            for layout, descriptor in zip(layouts, descriptors, strict=True)
            if counts_layers
        ]
        """Counters of the workers."""
        caches = list(zip(layouts, descriptors, strict=True))
        self.mover.open_caches(1, caches, engine, machine, disk)
        self.address = ""

    def listen(self) -> None:
        """Accept TCP connections for the mover."""
        listening = socket.create_server(("127.0.0.1", 0))
        host, port = listening.getsockname()
        self.address = f"{host}:{port}"

        def accept() -> None:
            while True:
                connection, peer = listening.accept()
                self.mover.adopt(connection, peer[0])

        threading.Thread(target=accept, daemon=True).start()

    def endpoint(self, is_remote: bool = False) -> bytes:
        machine = self.mover.machine(self.address)
        if is_remote:
            machine = msgspec.structs.replace(machine, host="elsewhere")
        return encode_endpoint(KvEndpoint([machine]))

    def fill(
        self, contents: Bytes, block_ids: list[int], layers: range = range(NUM_LAYERS)
    ) -> None:
        """Write contents of some layers into blocks of all workers."""
        for pages in self.pages:
            slots = pages.find_slots(block_ids, 0, contents.shape[2])
            for each in (each for each in pages.layout.layers if each.layer in layers):
                for head in each.heads:
                    part = contents[each.layer, head]
                    run = np.concatenate([part[:, :KEY_BYTES].ravel(), part[:, KEY_BYTES:].ravel()])
                    pages.write(each.layer, range(head, head + 1), slots, run)

    def serve(self, contents: Bytes, block_ids: list[int], ticket: int) -> None:
        self.fill(contents, block_ids)
        self.mover.handle(ServeKv(ticket, contents.shape[2], block_ids))

    def fetch(self, command: FetchKv) -> KvFetched:
        self.mover.handle(command)
        return self.wait(KvFetched)

    def wait(self, kind: type[Report]) -> Report:
        """Return the next report of a kind; others before it are dropped."""
        end = time.monotonic() + WAIT_SECONDS
        while True:
            report = self.reports.get(timeout=max(0.0, end - time.monotonic()))
            if isinstance(report, kind):
                return report

    def differs(self, contents: Bytes, block_ids: list[int], first: int) -> bool:
        """Return whether blocks have other bytes than the contents from a token on."""
        block_size = self.pages[0].layout.block_size
        count = contents.shape[2] - first
        for pages in self.pages:
            slots = pages.find_slots(block_ids, first % block_size, count)
            for each in pages.layout.layers:
                for head in each.heads:
                    run = pages.read(each.layer, range(head, head + 1), slots)
                    part = contents[each.layer, head, first:]
                    keys, values = part[:, :KEY_BYTES].ravel(), part[:, KEY_BYTES:].ravel()
                    if not np.array_equal(run, np.concatenate([keys, values])):
                        return True
        return False

    def count_written_slots(self) -> int:
        """Return the slots of all workers, layers and heads that have bytes other than 0."""
        count = 0
        for pages in self.pages:
            blocks = list(range(pages.layout.num_blocks))
            slots = pages.find_slots(blocks, 0, len(blocks) * pages.layout.block_size)
            for each in pages.layout.layers:
                for head in each.heads:
                    run = pages.read(each.layer, range(head, head + 1), slots)
                    keys = run[: len(slots) * KEY_BYTES].reshape(len(slots), -1)
                    count += int(keys.any(axis=1).sum())
        return count


def dial_plain(machine: KvMachine) -> socket.socket:
    """Connect without encryption."""
    host, _, port = machine.address.rpartition(":")
    return socket.create_connection((host, int(port)))
