"""Pairs of what happens to an engine at once: sleep, recovery, rebalance, drain, stop.

The first one is under way, with a running request, when the second one begins.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import pytest

from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.engine.interface import EngineUnavailableError
from tests.support.engines.scripted_engine import scripted_engine
from tests.support.nodes.scripted_node import ScriptedNode

NUM_TOKENS = 25
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


@dataclass
class Rig:
    """An engine with a running request, and the calls that wait."""

    engine: Engine
    node: ScriptedNode
    tasks: dict[str, asyncio.Task[Any]] = field(default_factory=dict)

    def begin(self, name: str, work: Awaitable[object]) -> None:
        self.tasks[name] = asyncio.ensure_future(work)

    async def generate(self) -> tuple[int, str]:
        num_tokens, reason = 0, ""
        async for delta in self.engine.generate([5, 6], PARAMS):
            num_tokens += len(delta.token_ids)
            reason = delta.error or delta.finish_reason or ""
        return num_tokens, reason

    async def result(self, name: str) -> str:
        """Return how a call ended: ok, or the reason of its error."""
        try:
            await self.tasks[name]
        except EngineUnavailableError as error:
            return error.reason
        return "ok"

    # What may happen; each returns at once.

    async def sleep(self) -> None:
        self.begin("sleep", self.engine.sleep())
        await asyncio.sleep(0)

    async def recover(self) -> None:
        self.node.may_load.clear()
        self.node.crash(1)
        await until(lambda: self.engine.status().recovering_since is not None or self.is_dead)

    async def rebalance(self) -> None:
        """Divide the layers anew, which ends the epoch once they have been loaded."""
        self.node.may_load.clear()
        supervisor = self.engine._supervisor
        (begin, middle), (_, end) = supervisor.recovery.layers
        layers = [(begin, middle - 1), (middle - 1, end)]
        now = time.monotonic()
        supervisor.execute(supervisor.recovery.change_layers(layers, "one is slow", now))
        await until(lambda: self.engine.status().recovering_since is not None or self.is_dead)

    async def drain(self) -> None:
        self.begin("drain", self.engine.drain(30))
        await asyncio.sleep(0)

    async def stop(self) -> None:
        self.begin("stop", self.engine.stop())
        await until(lambda: self.is_dead)

    @property
    def is_dead(self) -> bool:
        return self.engine.state == "dead"


OPERATIONS = ("sleep", "recover", "rebalance", "drain", "stop")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(*pair, marks=[] if "sleep" in pair else pytest.mark.full)
        for pair in permutations(OPERATIONS, 2)
    ],
)
async def test_pairs(first: str, second: str) -> None:
    engine, node = scripted_engine()
    async with asyncio.timeout(30):
        await engine.start()
        rig = Rig(engine, node)
        try:
            request = asyncio.create_task(rig.generate())
            await until(lambda: engine.status().stats.running)
            await getattr(rig, first)()
            if first == "stop" and second in ("recover", "rebalance"):
                return
            await getattr(rig, second)()
            node.may_load.set()
            pair = {first, second}
            is_refused = second == "sleep" and first in ("recover", "rebalance")
            if pair & {"sleep", "drain", "stop"} and not is_refused:
                assert not engine.accepts_requests
                with pytest.raises(EngineUnavailableError) as error:
                    await rig.generate()
                reasons = [name for name in ("stop", "drain", "sleep") if name in pair]
                words = {"stop": "dead", "drain": "draining", "sleep": "sleeping"}
                assert error.value.reason == words[reasons[0]]
            else:
                assert engine.accepts_requests
            expected = (NUM_TOKENS, "length")
            assert (await request == expected) == ("stop" not in pair)
            if "stop" in pair:
                assert request.result()[1] == "the engine was stopped"
            if "sleep" in pair:
                ended = {"drain": "draining", "stop": "dead"}
                (other,) = pair - {"sleep"}
                # A sleep while the engine recovers, drains or is dead is refused at once.
                refused = {**ended, "recover": "recovering", "rebalance": "recovering"}
                outcomes = refused if first == other else ended
                assert await rig.result("sleep") == outcomes.get(other, "ok")
                if not is_refused and other in ("recover", "rebalance"):
                    assert (engine.state, engine.status().epoch) == ("sleeping", 2)
                    engine.wake_up()
                    assert await rig.generate() == expected
            if "drain" in pair:
                assert await rig.result("drain") == "ok"
        finally:
            await engine.stop()


async def test_a_sleeping_engine_whose_worker_dies_stays_asleep() -> None:
    engine, node = scripted_engine()
    async with engine, asyncio.timeout(30):
        await engine.sleep()
        node.may_load.clear()
        node.crash(0)
        await until(lambda: engine.state == "recovering")
        assert engine.status().is_sleeping
        for call in (engine.generate([5], PARAMS).__anext__(), engine.embed([5])):
            with pytest.raises(EngineUnavailableError) as error:
                await call
            assert error.value.reason == "sleeping"
        # A second call waits for the recovery.
        again = asyncio.create_task(engine.sleep())
        await asyncio.sleep(0.05)
        assert not again.done()
        node.may_load.set()
        await again
        assert engine.state == "sleeping"
        engine.wake_up()
        assert engine.accepts_requests


async def test_a_sleep_that_is_interrupted_is_no_sleep() -> None:
    engine, node = scripted_engine()
    async with engine, asyncio.timeout(30):
        rig = Rig(engine, node)
        request = asyncio.create_task(rig.generate())
        await until(lambda: engine.status().stats.running)
        await rig.sleep()
        engine.wake_up()
        assert await rig.result("sleep") == "awake"
        assert await request == (NUM_TOKENS, "length")


async def test_a_death_during_the_reset_is_recovered_before_the_answer() -> None:
    engine, node = scripted_engine()
    async with engine, asyncio.timeout(30):
        rig = Rig(engine, node)
        node.answers_commands = False
        await rig.sleep()
        await until(lambda: engine._supervisor.commands.num_running)
        node.may_load.clear()
        node.crash(1)
        await until(lambda: engine.state == "recovering")
        node.answers_commands = True
        node.may_load.set()
        assert await rig.result("sleep") == "ok"
        assert (engine.state, engine.status().epoch) == ("sleeping", 2)
