"""Kill an engine, its mover or a worker at each state of a hand-off: same text, nothing left.

Or abort the request: nothing is left either.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gllm.kernels.native.builds import BUILD_VARIABLE, select_build
from gllm.routing.handoff import Handoff, HandoffState
from tests.e2e.fleet import EngineProcess
from tests.e2e.kv_rig import KvRouter, generate
from tests.e2e.server import children, places

EXACT = ("--dtype", "float32", "--threads", "1", "--max-model-len", "256")
"""Flags with which a decoded token has the logits of the same token computed in a prefill."""
SLOW = ("--kv-transfer", "mock:0.0005", "--kv-fetch", "always", "--debug-step-seconds", "0.05")
"""A step takes longer than a delay of DELAYS, and a fetch of PROMPT much longer."""
PROMPT = [300 + 7 * number for number in range(80)]
"""240 KiB of keys and values, which take half a second."""
MAX_TOKENS = 8
DELAYS = {
    HandoffState.PREFILL: 0.03,
    HandoffState.READY: 0.0,
    HandoffState.TRANSFER: 0.15,
    HandoffState.DECODE: 0.0,
}
"""Seconds from the begin of a state to the kill: in a step, at once, in the fetch, at once."""
VICTIMS = ("mover", "worker", "engine")
Case = tuple[HandoffState, str, str]
"""State, engine and victim."""


class KilledEngines(KvRouter):
    """A router, and engines that are processes of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.engines: dict[str, EngineProcess] = {}
        self.on_state: Callable[[HandoffState], None] = lambda state: None
        """Called when a hand-off comes to a state."""
        set_attribute = Handoff.__setattr__

        def watch(handoff: Handoff, name: str, value: Any) -> None:
            set_attribute(handoff, name, value)
            if name == "state":
                self.on_state(value)

        monkeypatch.setattr(Handoff, "__setattr__", watch)
        self.policy.prefill, self.policy.decode = "P", "D"

    async def start_missing(self) -> None:
        """Start the engines that do not run; wait until both take hand-offs."""
        for name in ("P", "D"):
            if name not in self.engines:
                engine = EngineProcess("demo", name, self.address, *EXACT, *SLOW)
                self.engines[name] = engine
        await self.until(lambda: self.able == {"P", "D"})

    def kill(self, name: str, victim: str) -> None:
        """Kill an engine with all of its processes, its mover or its worker."""
        engine = self.engines[name]
        head = engine.process.pid
        if victim == "engine":
            engine.kill()
            self.engines.pop(name).close()
        elif victim == "worker":
            (worker,) = places(head).values()
            os.kill(worker, signal.SIGKILL)
        else:
            (mover,) = [pid for pid in children(head) if is_mover(pid)]
            os.kill(mover, signal.SIGKILL)

    async def close(self) -> None:
        """End all processes."""
        for engine in self.engines.values():
            engine.close()
        await self.router.stop()


def is_mover(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"gllm-link")


@asynccontextmanager
async def killed_engines(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KilledEngines]:
    """A router with both engines. All kernels are those of the build: nothing is measured."""
    monkeypatch.setenv(BUILD_VARIABLE, select_build().name)
    rig = KilledEngines(monkeypatch)
    try:
        await rig.router.start()
        await rig.start_missing()
        yield rig
    finally:
        await rig.close()


async def check_case(rig: KilledEngines, case: Case, expected: list[int]) -> None:
    """Kill a process at a state of a request's hand-off; the request must not be disturbed."""
    state, name, victim = case
    kills: list[asyncio.Task[None]] = []

    async def kill_and_wait() -> None:
        if DELAYS[state]:
            await asyncio.sleep(DELAYS[state])
            rig.kill(name, victim)
        await rig.until(lambda: name not in rig.able)

    def on_state(present: HandoffState) -> None:
        if present is state and not kills:
            if not DELAYS[state]:
                rig.kill(name, victim)
            kills.append(asyncio.create_task(kill_and_wait()))

    rig.on_state = on_state
    assert await generate(rig.router, PROMPT, MAX_TOKENS) == expected, case
    rig.on_state = lambda state: None
    (kill,) = kills
    await kill
    await rig.until(lambda: rig.able == set(rig.engines))
    await rig.until_empty()


async def check_abort(rig: KilledEngines, state: HandoffState) -> None:
    """Abort a request at a state of its hand-off."""
    await rig.start_missing()
    request = asyncio.create_task(generate(rig.router, PROMPT, MAX_TOKENS))

    def on_state(present: HandoffState) -> None:
        if present is state:
            asyncio.get_running_loop().call_later(DELAYS[state], request.cancel)

    rig.on_state = on_state
    with pytest.raises(asyncio.CancelledError):
        await request
    rig.on_state = lambda state: None
    assert rig.router._fleet.client.num_requests == 0
    await rig.until_empty()


async def check_cases(
    monkeypatch: pytest.MonkeyPatch, aborts: Sequence[HandoffState], cases: Sequence[Case]
) -> None:
    """Check cases one after another; engines that were killed are started again before the next."""
    async with killed_engines(monkeypatch) as rig:
        rig.policy.decode = "P"
        expected = await generate(rig.router, PROMPT, MAX_TOKENS)
        rig.policy.decode = "D"
        assert not rig.handoffs.num_ended, "one engine has computed it"
        for state in aborts:
            await rig.router.reset_prefix_cache()
            await check_abort(rig, state)
        for case in cases:
            await rig.start_missing()
            await rig.router.reset_prefix_cache()
            await check_case(rig, case, expected)
        assert rig.router._fleet.client.num_inexact_migrations == 0


async def test_requests_survive_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    await check_cases(
        monkeypatch,
        [HandoffState.READY, HandoffState.TRANSFER],
        [
            (HandoffState.READY, "P", "mover"),
            (HandoffState.TRANSFER, "D", "mover"),
            (HandoffState.TRANSFER, "P", "engine"),
        ],
    )


@pytest.mark.long
@pytest.mark.parametrize("state", DELAYS, ids=lambda state: state.value)
async def test_requests_survive_a_kill_at_each_state(
    state: HandoffState, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [(state, name, victim) for victim in VICTIMS for name in ("P", "D")]
    await check_cases(monkeypatch, [state], cases)
