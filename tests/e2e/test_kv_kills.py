"""Kill an engine, its mover or a worker at each state of a hand-off: same text, nothing left.

Or abort the request: nothing is left either.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gllm.messages.codec import AnyMessage
from gllm.routing.handoff import Handoff, HandoffState
from gllm.runtime.messaging.connection_pool import PeerConnection
from gllm.runtime.messaging.fleet_links import FleetLinks
from tests.support.servers.fleet import EngineProcess
from tests.support.servers.kv_rig import KvRouter, generate
from tests.support.servers.server import children_titled, places

EXACT = ("--dtype", "float32", "--threads", "1", "--max-model-len", "256")
"""Flags with which a decoded token has the logits of the same token computed in a prefill."""
SLOW = ("--kv-transfer", "mock:0.0005", "--kv-fetch", "always", "--debug-step-seconds", "0.05")
"""A step takes longer than a delay of DELAYS, and a fetch of PROMPT much longer."""
PUSHES = ("--kv-push", "layer", "--kv-push-threshold", "100")
PROMPT = [300 + 7 * number for number in range(80)]
"""240 KiB of keys and values, which take half a second; fetched after the prefill."""
PUSHED_PROMPT = [300 + 7 * number for number in range(160)]
"""Fetched during the prefill."""
MAX_TOKENS = 8
PUSH = "push"
"""Begin of a fetch during the prefill."""
Moment = HandoffState | str
"""State of a hand-off, or PUSH."""
DELAYS: dict[Moment, float] = {
    PUSH: 0.03,
    HandoffState.PREFILL: 0.03,
    HandoffState.READY: 0.0,
    HandoffState.TRANSFER: 0.15,
    HandoffState.DECODE: 0.0,
}
"""Seconds from a moment to the kill: 0.0 is at once, the others are in a step or in the fetch."""
VICTIMS = ("mover", "worker", "engine")
Case = tuple[Moment, str, str]
"""Moment, engine and victim."""


def watch_links(after: Callable[[], None]) -> type[FleetLinks]:
    """Return sessions of a router that call a function after each event."""

    class WatchedLinks(FleetLinks):
        def on_message(self, connection: PeerConnection, message: AnyMessage) -> None:
            super().on_message(connection, message)
            after()

        def on_lost(self, connection: PeerConnection, cause: str) -> None:
            super().on_lost(connection, cause)
            after()

    return WatchedLinks


class KilledEngines(KvRouter):
    """A router, and engines that are processes of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(watch_links(self._note_unable))
        self.engines: dict[str, EngineProcess] = {}
        self.on_state: Callable[[Moment], None] = lambda state: None
        """Called when a hand-off comes to a state, and with PUSH."""
        self.unable: set[str] = set()
        """Engines that took no hand-offs after a message since this set was cleared."""
        set_attribute = Handoff.__setattr__

        def watch(handoff: Handoff, name: str, value: Any) -> None:
            set_attribute(handoff, name, value)
            with self.errors.kept():
                if name == "state":
                    self.on_state(value)
                elif name == "_prefetching" and value:
                    self.on_state(PUSH)

        monkeypatch.setattr(Handoff, "__setattr__", watch)
        self.policy.prefill, self.policy.decode = "P", "D"

    def _note_unable(self) -> None:
        """Note who takes no hand-offs after each message: the state may be short."""
        with self.errors.kept():
            self.unable |= {"P", "D"} - self.able

    async def start_missing(self) -> None:
        """Start the engines that do not run; wait until both take hand-offs."""
        for name in ("P", "D"):
            if name not in self.engines:
                engine = EngineProcess("demo", name, self.address, *EXACT, *SLOW, *PUSHES)
                self.engines[name] = engine
        await self.until(lambda: self.able == {"P", "D"})

    def kill(self, name: str, victim: str) -> None:
        """Kill an engine with all of its processes, its mover or its worker."""
        self.unable.clear()
        engine = self.engines[name]
        head = engine.process.pid
        if victim == "engine":
            engine.kill()
            self.engines.pop(name).close()
        elif victim == "worker":
            (worker,) = places(head).values()
            os.kill(worker, signal.SIGKILL)
        else:
            (mover,) = children_titled(head, "gllm-link")
            os.kill(mover, signal.SIGKILL)

    async def close(self) -> None:
        """End all processes."""
        for engine in self.engines.values():
            engine.close()
        await self.router.stop()


@asynccontextmanager
async def killed_engines(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KilledEngines]:
    """A router with both engines."""
    rig = KilledEngines(monkeypatch)
    try:
        await rig.router.start()
        await rig.start_missing()
        with rig.errors.raised():
            yield rig
    finally:
        await rig.close()


def choose_prompt(moment: Moment) -> list[int]:
    return PUSHED_PROMPT if moment == PUSH else PROMPT


async def check_case(rig: KilledEngines, case: Case, expected: list[int]) -> None:
    """Kill a process at a moment of a request's hand-off; the request must not be disturbed."""
    moment, name, victim = case
    kills: list[asyncio.Task[None]] = []

    async def kill_and_wait() -> None:
        if DELAYS[moment]:
            await asyncio.sleep(DELAYS[moment])
            rig.kill(name, victim)
        await rig.until(lambda: name in rig.unable)

    def on_state(present: Moment) -> None:
        if present is moment and not kills:
            if not DELAYS[moment]:
                rig.kill(name, victim)
            kills.append(asyncio.create_task(kill_and_wait()))

    rig.on_state = on_state
    assert await generate(rig.router, choose_prompt(moment), MAX_TOKENS) == expected, case
    rig.on_state = lambda state: None
    (kill,) = kills
    await kill
    await rig.until(lambda: rig.able == set(rig.engines))
    await rig.until_empty()


async def check_abort(rig: KilledEngines, moment: Moment) -> None:
    """Abort a request at a moment of its hand-off."""
    await rig.start_missing()
    request = asyncio.create_task(generate(rig.router, choose_prompt(moment), MAX_TOKENS))

    def on_state(present: Moment) -> None:
        if present is moment:
            asyncio.get_running_loop().call_later(DELAYS[moment], request.cancel)

    rig.on_state = on_state
    with pytest.raises(asyncio.CancelledError):
        await request
    rig.on_state = lambda state: None
    assert rig.fleet.client.num_requests == 0
    await rig.until_empty()


async def check_cases(
    monkeypatch: pytest.MonkeyPatch, aborts: Sequence[Moment], cases: Sequence[Case]
) -> None:
    """Check cases one after another; engines that were killed are started again before the next."""
    async with killed_engines(monkeypatch) as rig:
        rig.policy.decode = "P"
        expected = {
            moment: await generate(rig.router, choose_prompt(moment), MAX_TOKENS)
            for moment in {case[0] for case in cases}
        }
        rig.policy.decode = "D"
        assert not rig.handoffs.num_ended, "one engine has computed it"
        for moment in aborts:
            await rig.router.reset_prefix_cache()
            await check_abort(rig, moment)
        for case in cases:
            await rig.start_missing()
            await rig.router.reset_prefix_cache()
            await check_case(rig, case, expected[case[0]])
        assert rig.fleet.client.numerics.num_inexact_migrations == 0


@pytest.mark.full
async def test_requests_survive_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    await check_cases(
        monkeypatch,
        [HandoffState.READY, HandoffState.TRANSFER, PUSH],
        [
            (HandoffState.READY, "P", "mover"),
            (HandoffState.TRANSFER, "D", "mover"),
            (HandoffState.TRANSFER, "P", "worker"),
            (PUSH, "D", "worker"),
            (PUSH, "P", "engine"),
        ],
    )


@pytest.mark.long
@pytest.mark.parametrize("moment", DELAYS, ids=str)
async def test_requests_survive_a_kill_at_each_moment(
    moment: Moment, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [(moment, name, victim) for victim in VICTIMS for name in ("P", "D")]
    await check_cases(monkeypatch, [moment], cases)
