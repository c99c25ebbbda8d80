"""Engines of one process behind a whole router: its fleet, pair policy and hand-offs are real.

Messages between the router and the engines are those of production, without sockets.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import Any

import msgspec

from gllm.config.router import RouterConfig
from gllm.messages.base import WireMessage
from gllm.messages.fleet import EngineReport
from gllm.messages.handoff import FirstChunkComputed, PrefetchKv, ReleaseKvHolds, RenewKvHolds
from gllm.messages.requests import AbortSequences, SubmitRequest
from gllm.router.fleet import Fleet
from gllm.routing.disaggregation.policy import PairPolicy
from gllm.routing.disaggregation.policy_registry import make_pair_policy
from gllm.runtime.messaging.connection_pool import FleetLinkConfig
from gllm.scheduler.plan import SchedulerStats
from tests.support.engines.epochs import Stages
from tests.support.engines.kv_engines import MAX_MODEL_LEN
from tests.support.engines.moving_engines import MappedStages, MovingCluster, MovingEngine
from tests.support.routing.scripted_links import ANNOUNCE, ScriptedLink, ScriptedLinks

FOR_DRIVER = SubmitRequest | AbortSequences | PrefetchKv | ReleaseKvHolds | RenewKvHolds


class _EngineLink(ScriptedLink):
    """The router's session with an engine."""

    engine: MovingEngine
    submissions: list[tuple[str, SubmitRequest]]
    """Requests of the router in their order, with the names of their engines."""
    needs_first_chunks: bool

    def send(self, message: WireMessage) -> None:
        super().send(message)
        if isinstance(message, SubmitRequest):
            self.submissions.append((self.name, message))
            # As the engine's session with the router does.
            message = msgspec.structs.replace(message, reports_first_chunk=self.needs_first_chunks)
        if isinstance(message, FOR_DRIVER):
            self.engine.receive(message)


class _Links(ScriptedLinks):
    """Sessions whose engines know what the router has to receive."""

    def __init__(self, config: FleetLinkConfig, *args: Any) -> None:
        super().__init__(config, *args)
        self.greeting = msgspec.structs.replace(
            self.greeting, needs_first_chunks=config.needs_first_chunks
        )


class RoutedCluster(MovingCluster):
    """A router with a preset over engines, whose roles are the first letters of their names."""

    _links: Any

    def __init__(self, engines: Mapping[str, MappedStages], preset: str, **options: Any) -> None:
        config = RouterConfig(policy="least-requests", preset=preset, **options)
        self.policy: PairPolicy = make_pair_policy(preset, Random(0), config.flows or None)

        def create_links(*args: Any) -> Any:
            self._links = _Links(*args)
            return self._links

        self.fleet = Fleet(config, "hash", MAX_MODEL_LEN, create_links, self.policy)
        self.submissions: list[tuple[str, SubmitRequest]] = []
        """Requests that were sent to engines, in this order, with the engines' names."""
        self.num_first_chunks = 0
        """Reports of first chunks by the engines."""
        super().__init__(dict(engines), client=self.fleet.client)

    def attach(self, name: str, stages: Stages, *_: object) -> None:
        engine = self.engines[name] = self.create_engine(name, stages)
        scheduler = stages.scheduler_config
        link = _EngineLink(
            self._links,
            msgspec.structs.replace(
                ANNOUNCE,
                name=name,
                role={"P": "prefill", "D": "decode"}.get(name[0], "mixed"),
                max_model_len=MAX_MODEL_LEN,
                vocab_size=stages.executors[0].model.vocab_size,
                block_size=scheduler.block_size,
                num_blocks=scheduler.num_blocks,
                max_num_seqs=scheduler.max_num_seqs,
                policy=scheduler.policy,
                kv_endpoint=engine.endpoint(),
                kv_digest="same",
                accepts_prefetches=True,
            ),
        )
        link.engine, link.submissions = engine, self.submissions
        link.needs_first_chunks = self._links.greeting.needs_first_chunks
        self._links.links[name] = link
        self._links.on_attached(link)

    def on_message(self, name: str, message: WireMessage) -> None:
        self.num_first_chunks += isinstance(message, FirstChunkComputed)
        link = self._links.links.get(name)
        if link is not None:
            self._links.on_message(link, message)

    def report(self, name: str, stats: SchedulerStats | None = None, state: str = "ready") -> None:
        """Report the state and load of an engine, as its pacer does; or another load."""
        stats = stats or self.engines[name].scheduler.stats()
        self.on_message(name, EngineReport(state, "", stats))

    def kill(self, name: str) -> None:
        engine = self.engines.pop(name)
        engine.mover.close()
        self.departed.append(engine)
        self._links.links[name].leave()


@contextmanager
def routed(
    engines: Mapping[str, MappedStages], preset: str, **options: Any
) -> Iterator[RoutedCluster]:
    """Return a cluster whose movers and timers end with the context; needs a running event loop."""
    cluster = RoutedCluster(engines, preset, **options)
    try:
        yield cluster
    finally:
        if cluster.fleet._read_poll is not None:
            cluster.fleet._read_poll.cancel()
        for engine in cluster.engines.values():
            engine.mover.close()
