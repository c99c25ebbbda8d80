"""Routers and engines of one process that talk over real sockets."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec

from gllm.engine.attachment.attachment import RouterAttachment
from gllm.messages.codec import AnyMessage
from gllm.messages.fleet import OLDEST_PROTOCOL, PROTOCOL, AnnounceEngine, EngineReport, GreetEngine
from gllm.messages.handoff import HandoffCommand
from gllm.messages.requests import EngineOutputs, SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.options.addresses import Resolve, resolve_host
from gllm.recovery.admission_state import AdmissionState
from gllm.runtime.head.client import EngineClient
from gllm.runtime.head.kv_events import KvEventSource
from gllm.runtime.messaging.connection_pool import FleetLinkConfig
from gllm.runtime.messaging.fleet_links import EngineLink, FleetLinks
from tests.support.engines.fake_driver import FakeDriver


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def announcement(name: str = "one", run: int = 1, **fields: Any) -> AnnounceEngine:
    basic = AnnounceEngine(
        PROTOCOL, OLDEST_PROTOCOL, name, run, "mixed", "demo", "h", "n", "0", 512, 300, 16, 64, 1
    )
    return msgspec.structs.replace(basic, **fields)


class FakeEngine:
    """An engine without workers, whose tokens are those of FakeDriver."""

    def __init__(self) -> None:
        self.client = EngineClient()
        self.driver = FakeDriver()
        self.client.attach(self.driver.send)
        self.kv_events = KvEventSource()
        self.state, self.state_cause = "ready", ""
        self.is_recovery_overdue = False
        self.reset_error = ""
        self.kv_commands: list[HandoffCommand] = []
        self._listeners: list[Callable[[], None]] = []
        self._rng = random.Random(1)

    @property
    def admission(self) -> AdmissionState:
        is_sleeping, is_draining = self.state == "sleeping", self.state == "draining"
        phase = "ready" if is_sleeping or is_draining else self.state
        return AdmissionState(phase, is_sleeping, is_draining, self.is_recovery_overdue)

    async def reset_prefix_cache(self) -> str:
        return self.reset_error

    def send_kv_command(self, message: HandoffCommand) -> None:
        self.kv_commands.append(message)

    def add_change_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def change(self, state: str, cause: str = "") -> None:
        self.state, self.state_cause = state, cause
        for listener in self._listeners:
            listener()

    def step(self, batch: int = 1) -> None:
        """Compute a token of some sequences."""
        if self.driver.schedule(self._rng):
            self.client.on_report(self.driver.commit(batch))


class _RouterLinks(FleetLinks):
    """Sessions of a router whose heartbeats a test can stop."""

    is_silent = False

    def on_tick(self) -> None:
        if not self.is_silent:
            super().on_tick()


class EngineSessions(RouterAttachment):
    """Sessions of an engine that a test can end, or whose heartbeats and reports it can stop."""

    is_silent = False

    def end_sessions(self) -> None:
        """End all sessions, as after a silence of the routers."""
        for session in self.routers:
            self._pool.close(session.connection, "the test ends it")
            self.on_lost(session.connection, "the test ends it")

    def on_tick(self) -> None:
        if not self.is_silent:
            super().on_tick()


class TestRouter:
    """A router that keeps what its engines send."""

    __test__ = False

    def __init__(
        self, name: str = "router", resolve: Resolve = resolve_host, **config: Any
    ) -> None:
        self.attached: list[str] = []
        self.lost: list[tuple[str, str]] = []
        self.refusal = ""
        """Cause for which it refuses all engines; empty to accept them."""
        self.messages: list[AnyMessage] = []
        self.links = _RouterLinks(
            FleetLinkConfig(**config),
            name,
            self._on_attached,
            self._on_lost,
            self._on_message,
            resolve,
        )

    @property
    def port(self) -> str:
        return self.links.hub_address.rpartition(":")[2]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def outputs(self) -> list[EngineOutputs]:
        return [each for each in self.messages if isinstance(each, EngineOutputs)]

    def link(self, name: str = "one") -> EngineLink:
        return self.links.links[name]

    def tokens(self) -> dict[int, list[int]]:
        """Tokens by wire id."""
        tokens: dict[int, list[int]] = {}
        for message in self.outputs:
            outcome = message.outcome
            for seq, token in zip(outcome.seqs, outcome.token_ids, strict=True):
                tokens.setdefault(seq, []).append(token)
        return tokens

    def ends(self) -> dict[int, tuple[str, str]]:
        """Finish reason and kind of the error by wire id."""
        ends: dict[int, tuple[str, str]] = {}
        for message in self.outputs:
            kinds = dict(message.error_kinds)
            for end in message.outcome.finished:
                assert end.seq not in ends, "a sequence ends once"
                ends[end.seq] = end.finish_reason, kinds.get(end.seq, "")
        return ends

    def errors(self) -> dict[int, str]:
        return {
            end.seq: end.error
            for each in self.outputs
            for end in each.outcome.finished
            if end.error
        }

    def _on_attached(self, link: EngineLink) -> None:
        assert isinstance(link.report, EngineReport)
        if self.refusal:
            link.refuse(self.refusal)
            return
        self.attached.append(link.name)

    def _on_lost(self, link: EngineLink, cause: str) -> None:
        assert self.links.links.get(link.name) is not link
        self.lost.append((link.name, cause))

    def _on_message(self, link: EngineLink, message: AnyMessage) -> None:
        assert link.is_attached
        self.messages.append(message)


class Links:
    """Routers and engines that are stopped at the end of a test."""

    def __init__(self) -> None:
        self._started: list[FleetLinks | RouterAttachment] = []

    async def router(
        self, name: str = "router", greeting: GreetEngine | None = None, **config: Any
    ) -> TestRouter:
        router = TestRouter(name, **config)
        router.links.greeting = greeting or router.links.greeting
        self._started.append(router.links)
        await router.links.start()
        return router

    async def engine(
        self,
        announce: AnnounceEngine | None = None,
        resolve: Resolve = resolve_host,
        max_num_queued_requests: int | None = None,
        **config: Any,
    ) -> tuple[FakeEngine, EngineSessions]:
        engine, announced = FakeEngine(), announce or announcement()
        attachment = EngineSessions(
            engine,
            lambda: announced,
            FleetLinkConfig(**config),
            resolve,
            max_num_queued_requests=max_num_queued_requests,
        )
        self._started.append(attachment)
        await attachment.start()
        return engine, attachment

    async def pair(self) -> tuple[TestRouter, FakeEngine, EngineSessions]:
        """Return a router and an engine that has dialled it."""
        router = await self.router(hub="127.0.0.1:0")
        engine, attachment = await self.engine(dial=(router.address,))
        await until(lambda: router.attached)
        return router, engine, attachment

    async def stop(self) -> None:
        for each in self._started:
            await each.stop()


def request(seq: int, prompt: list[int], max_tokens: int = 5, **fields: Any) -> SubmitRequest:
    sampling = fields.pop("sampling", SequenceSamplingParams())
    return SubmitRequest(seq, prompt, sampling, max_tokens, [0], **fields)
