"""Engines and routers of a simulated fleet: the real objects of both ends of their links."""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from random import Random
from typing import Any

from gllm.config.router import RouterConfig
from gllm.engine.attachment.attachment import RouterAttachment
from gllm.messages.fleet import OLDEST_PROTOCOL, PROTOCOL, AnnounceEngine
from gllm.observability.logs import DEFAULT_LOG_CONFIG
from gllm.router.dispatch_target import DispatchTarget
from gllm.router.fleet import Fleet
from gllm.routing.policy import RoutingPolicy
from gllm.runtime.head.journal import JournalEntry
from gllm.runtime.head.supervisor import EngineError
from gllm.runtime.messaging.connection_pool import FleetLinkConfig
from tests.support.simulation.clock import VirtualLoop
from tests.support.simulation.head import HEAD, create_supervisor
from tests.support.simulation.model import VOCAB_SIZE
from tests.support.simulation.network import Context, Network
from tests.support.simulation.node import SimulatedNode
from tests.support.simulation.process import Process
from tests.support.simulation.requests import Reader
from tests.support.simulation.world import BLOCK_SIZE, MAX_MODEL_LEN, World

LINKS: ContextVar[Context] = ContextVar("LINKS")
"""Place of the ZeroMQ context with which a pool of links that starts reaches its peers."""
MODEL_HASH = "hash"


def raise_error(task: "asyncio.Task[None]") -> None:
    """Raise the unexpected error of a task, which ends the simulation."""
    if not task.cancelled():
        task.result()


def describe_stages(num_stages: int) -> str:
    """Return the numerics of an engine."""
    return f"{num_stages} stages"


class SimulatedEngine:
    """One start of an engine: head process, workers, and its sessions with routers."""

    def __init__(
        self,
        name: str,
        num_stages: int,
        links: FleetLinkConfig,
        network: Network,
        rng: Random,
        on_moment: Callable[[str, Process], None],
    ) -> None:
        """Create an engine that has not started.

        Args:
            name: of the engine.
            num_stages: engines with as many have equal numerics.
            links: hub and routers.
            network: between engines and routers.
            rng: source of its times and numbers.
            on_moment: called at each step of a worker's life.
        """
        loop = network.loop
        assert isinstance(loop, VirtualLoop)
        self.name, self.num_stages = name, num_stages
        self.process = Process(loop, name)
        self.is_alive = True
        """False from its death or the beginning of its planned end."""
        self.network = network
        inner = Network(loop, rng)
        self.world = World(loop, rng, inner, on_moment)
        self.node = SimulatedNode(self.world)
        self.supervisor = create_supervisor(
            [1] * num_stages,
            max_num_seqs=rng.choice([2, 8]),
            max_restarts=rng.choice([0, 3, 50]),
            recovery_timeout=rng.choice([3.0, 60.0]),
            standby_workers=rng.choice([0, 0, 1]),
        )
        self._run = rng.getrandbits(62)
        self.attachment = RouterAttachment(self.supervisor, self._announce, links)
        self._head_context = Context(inner, self.process)
        self._link_context = Context(network, self.process)
        self._task = loop.create_task(self._serve())
        self._task.add_done_callback(raise_error)
        self.has_ended = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        return self.is_alive and self.supervisor.state == "ready"

    @property
    def workers(self) -> list[Process]:
        """Living workers."""
        return [each.process for each in self.node.workers.values() if each.process.is_alive]

    def kill(self) -> None:
        """Kill the head process; the kernel kills its workers."""
        if not self.process.is_alive:
            return
        was_alive, self.is_alive = self.is_alive, False
        self.network.unbind(self.process)
        self.process.end(is_killed=True)
        self.node.watch(lambda sender, description: None)
        for sender in list(self.node.workers):
            self.node.kill(sender)
        if was_alive:
            self._task.cancel()

    async def stop(self, drain_seconds: float) -> None:
        """End in good order, as for a restart."""
        if self.is_alive:
            self.is_alive = False
            await self.attachment.drain()
            await self.supervisor.drain(drain_seconds)
            self._task.cancel()
        await self.has_ended.wait()

    async def _serve(self) -> None:
        """Start, serve until the engine dies or is stopped, and release everything."""
        HEAD.set(self._head_context)
        LINKS.set(self._link_context)
        try:
            await self.supervisor.start(Path("demo"), self.node, DEFAULT_LOG_CONFIG)
            await self.attachment.start()
            await self.supervisor.died.wait()
        except (EngineError, asyncio.CancelledError):
            pass
        finally:
            self.is_alive = False
            await self.attachment.stop()
            await self.supervisor.stop()
            self.network.unbind(self.process)
            self.process.end(is_killed=False)
            self.has_ended.set()

    def _announce(self) -> AnnounceEngine:
        return AnnounceEngine(
            PROTOCOL,
            OLDEST_PROTOCOL,
            self.name,
            self._run,
            "mixed",
            "model",
            MODEL_HASH,
            describe_stages(self.num_stages),
            "0",
            MAX_MODEL_LEN,
            VOCAB_SIZE,
            BLOCK_SIZE,
            self.supervisor.num_blocks,
            self.num_stages,
        )


class SimulatedRouter:
    """One start of a router, and the readers of its requests."""

    def __init__(self, name: str, network: Network, policy: RoutingPolicy, **options: Any) -> None:
        """Create a router that has not started.

        Args:
            name: of the process.
            network: between engines and routers.
            policy: chooses the engine of a request.
            options: of the router's configuration.
        """
        self.network = network
        self.process = Process(network.loop, name)
        self.readers: list[Reader] = []
        config = RouterConfig(model="demo", **options)
        self.fleet = Fleet(config, MODEL_HASH, MAX_MODEL_LEN, policy=policy)
        self._count_submission = self.fleet.client.numerics.on_submission
        self.fleet.client.numerics.on_submission = self._on_submission  # type: ignore[method-assign]
        self._context = Context(network, self.process)
        self._task = network.loop.create_task(self._start())
        self._task.add_done_callback(raise_error)
        self._cleanup: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive

    @property
    def is_idle(self) -> bool:
        """True if all its requests have ended."""
        return all(reader.is_done for reader in self.readers)

    def kill(self) -> None:
        """Kill the process; its clients lose their connections."""
        self.network.unbind(self.process)
        self.process.end(is_killed=True)
        for reader in self.readers:
            reader.stream.remove_listener()
        self._cleanup = self.network.loop.create_task(self._stop())

    async def stop(self) -> None:
        """End in good order."""
        await self._stop()
        self.network.unbind(self.process)
        self.process.end(is_killed=False)

    def _on_submission(self, entry: JournalEntry, engine: DispatchTarget) -> None:
        """Check that other numerics continue tokens only where no equal ones could."""
        if entry.numerics not in ("", engine.numerics):
            assert not self.accepting_engines(entry.numerics)
        self._count_submission(entry, engine)

    @property
    def attached(self) -> list[str]:
        """Names of the engines that are attached, in order."""
        return [row.name for row in self.fleet.engines()]

    def accepting_engines(self, numerics: str) -> list[str]:
        """Return the names of the engines that take requests now and may continue such tokens."""
        return [
            row.name
            for row in self.fleet.engines()
            if row.state in ("ready", "ejected")
            and numerics in ("", describe_stages(row.num_stages))
        ]

    async def _start(self) -> None:
        LINKS.set(self._context)
        await self.fleet.start()

    async def _stop(self) -> None:
        await self._task
        await self.fleet.stop()
