"""Leases on a real engine without requests: its driver takes a turn each second."""

import asyncio
from collections.abc import Callable

import pytest

from gllm.messages.handoff import KvHandoff
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.tickets import make_ticket
from gllm.runtime.stage_instance import StageInstance
from gllm.scheduler import kv_holds
from tests.support.engines.local_workers import local_engine

SECONDS = 60.0
GREEDY = SequenceSamplingParams(temperature=0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


async def test_blocks_return_when_a_lease_ends_without_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_holds, "HOLD_LEASE_SECONDS", 1.5)
    take_turn, num_turns = StageInstance._on_turn_timer, 0

    def count_turns(instance: StageInstance) -> None:
        nonlocal num_turns
        num_turns += 1
        take_turn(instance)

    monkeypatch.setattr(StageInstance, "_on_turn_timer", count_turns)
    async with local_engine(kv_transfer="auto") as (engine, node):
        client = engine._supervisor.client
        handoff = KvHandoff(make_ticket())
        stream = client.submit(list(range(300, 340)), GREEDY, 1, [], handoff=handoff)
        await until(lambda: not stream.alive)
        client.release(stream)
        # The last report of the engine: nobody sends it a message from now on.
        assert client.stats.held_blocks > 0
        await until(lambda: client.stats.held_blocks == 0)
        assert client.stats.kv_usage == 0
        assert num_turns > 0
        (worker,) = node.workers.values()
        await until(lambda: not worker.instance._driver.kv.is_active)
