"""Engines of one process whose KV moves as in production: mapped caches and real KV movers.

Everything but the processes is real. Steps are computed on the caller's thread, transfers run on
the threads of the movers meanwhile.
"""

import os
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from gllm.messages.base import WireMessage
from gllm.messages.handoff import KvPushStarted, PrefetchKv
from gllm.messages.kv_layout import KvLayout
from gllm.messages.kv_transfer import KvCommand, KvFetched, KvReport, KvRevoked, ServeKv
from gllm.router.client import FleetClient
from gllm.runtime.head.request_stream import RequestStream
from gllm.transport.kv.endpoint import KvEndpoint, encode_endpoint
from gllm.transport.kv.mover import KvMover
from gllm.transport.kv.pages import KvPages
from gllm.transport.kv.progress import LayerProgress
from tests.support.engines.epochs import Stages
from tests.support.engines.kv_engines import NUM_KV_TOKENS, KvCluster, KvEngine, load_stages

WAIT_SECONDS = 20.0
CHUNKED = {"max_prefill_tokens": 48, "max_num_batched_tokens": 48}
"""Chunks that are large enough to be counted layer by layer."""


class MappedStages(Stages):
    """Stages whose KV caches are in files, with counters of the computed layers."""

    def __init__(
        self,
        folder: Path,
        num_stages: int = 1,
        block_size: int = 8,
        num_kv_tokens: int = NUM_KV_TOKENS,
        **options: object,
    ) -> None:
        self.descriptors = [os.memfd_create("cache") for _ in range(num_stages)]
        stages = load_stages(
            folder, num_stages, block_size, self.descriptors, num_kv_tokens, **options
        )
        super().__init__(stages.executors, stages.scheduler_config)
        self.layouts: list[KvLayout] = []
        self.progress: list[LayerProgress] = []
        for executor, descriptor in zip(self.executors, self.descriptors, strict=True):
            layout = executor.describe_kv_cache("model")
            self.layouts.append(layout)
            if self.scheduler_config.push_threshold is not None:
                executor.share_layer_progress(descriptor, layout)
                self.progress.append(LayerProgress(descriptor, layout, is_writable=True))

    @property
    def files(self) -> list[tuple[KvLayout, int]]:
        """Layout and descriptor of each KV cache."""
        return list(zip(self.layouts, self.descriptors, strict=True))


class MovingEngine(KvEngine):
    """Engine with a KV mover."""

    def __init__(self, name: str, stages: MappedStages, cluster: "MovingCluster") -> None:
        super().__init__(name, stages, cluster)
        for progress in stages.progress:
            # Steps are counted anew, as in the memory of a new epoch.
            for lane in range(stages.scheduler_config.num_lanes):
                progress.record(lane, 0, 0)
        self.reports: queue.SimpleQueue[KvReport] = queue.SimpleQueue()
        self.commands: list[WireMessage] = []
        self.pushed: set[int] = set()
        """Tickets of prompts that were served while they were computed."""
        self.mover = KvMover(
            lambda epoch, report: self.reports.put(report), cluster.backend, sleep=self.on_poll
        )
        caches = [(layout, os.dup(descriptor)) for layout, descriptor in stages.files]
        self.mover.open_caches(1, caches)
        self.pages = [KvPages(layout, each, is_writable=False) for layout, each in stages.files]

    def on_poll(self, seconds: float) -> None:
        """Wait on a thread of the mover until it looks again what is computed."""
        time.sleep(seconds)

    def endpoint(self) -> bytes:
        return encode_endpoint(KvEndpoint([self.mover.machine()]))

    def receive(self, message: WireMessage) -> None:
        super().receive(message)
        if isinstance(message, PrefetchKv):
            self.driver.run_iteration()

    def send(self, message: WireMessage) -> None:
        if isinstance(message, KvPushStarted):
            self.pushed.add(message.ticket)
        super().send(message)

    def command_mover(self, message: KvCommand) -> None:
        if isinstance(message, ServeKv):
            self.served[message.ticket] = message
        self.mover.handle(message)
        self.commands.append(message)

    def handle_reports(self) -> bool:
        """Pass the mover's reports to the driver; return False if there are none."""
        has_reports = False
        while not self.reports.empty():
            report = self.reports.get()
            match report:
                case KvRevoked(ticket):
                    self.served.pop(ticket, None)
                case KvFetched():
                    assert isinstance(self._cluster, MovingCluster)
                    self._cluster.fetched.append(report)
                    self.on_fetched(report)
            self.receive(report)
            has_reports = True
        return has_reports

    def on_fetched(self, report: KvFetched) -> None:
        """Handle the end of a fetch, before the driver does."""

    def count_fetched_bytes(self) -> int:
        """Return the bytes of the fetches that run."""
        return sum(fetch.num_bytes for fetch in list(self.mover._fetches.values()))

    def read_cache(self, block_ids: list[int], num_tokens: int) -> bytes:
        """Return the keys and values of tokens, by layer."""
        return b"".join(
            each.read(layer.layer, layer.heads, each.find_slots(block_ids, 0, num_tokens)).tobytes()
            for each in self.pages
            for layer in each.layout.layers
        )


class MovingCluster(KvCluster):
    """A router's client over engines with movers."""

    engines: dict[str, MovingEngine]  # type: ignore[assignment]

    def __init__(
        self,
        engines: dict[str, MappedStages],
        backend: str = "auto",
        client: FleetClient | None = None,
    ) -> None:
        self.backend = backend
        self.fetched: list[KvFetched] = []
        """Ends of fetches, of all engines."""
        super().__init__(dict(engines), client)

    def create_engine(self, name: str, stages: Stages) -> MovingEngine:
        assert isinstance(stages, MappedStages)
        return MovingEngine(name, stages, self)

    def kill(self, name: str) -> None:
        self.engines[name].mover.close()
        super().kill(name)

    def step(self) -> None:
        """Let every engine compute a step and handle its reports; wait if there is nothing."""
        is_idle = True
        for engine in list(self.engines.values()):
            has_reports = engine.handle_reports()
            is_idle = not (engine.step() or has_reports) and is_idle
            engine.deliver()
        if is_idle:
            time.sleep(0.001)

    def run(self, streams: list[RequestStream], until: Callable[[], bool] | None = None) -> None:
        super().run(streams, until)

    def check_empty(self) -> None:
        """No engine keeps anything, as soon as the movers have answered."""
        end = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < end:
            self.step()
            self.client.continue_handoffs()
            if all(
                engine.scheduler.kv_cache.free_share == 1 and not engine.served
                for engine in self.engines.values()
            ):
                break
        super().check_empty()


Cluster = TypeVar("Cluster", bound=MovingCluster)


@contextmanager
def closing(cluster: Cluster) -> Iterator[Cluster]:
    """Close the movers at the end."""
    try:
        yield cluster
    finally:
        for engine in cluster.engines.values():
            engine.mover.close()
