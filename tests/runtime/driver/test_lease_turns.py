"""Leases on a real engine without requests: its driver takes a turn each second."""

import asyncio
from collections.abc import Callable

import pytest

from gllm.messages.codec import decode_for_kv_mover
from gllm.messages.handoff import KvHandoff, make_ticket
from gllm.messages.kv_transfer import ServeKv
from gllm.messages.sampling import SequenceSamplingParams
from gllm.scheduler import kv_holds
from gllm.transport.descriptors import create_channels
from tests.support.engines.local_workers import local_supervisor

SECONDS = 60.0
GREEDY = SequenceSamplingParams(temperature=0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


async def test_blocks_return_when_a_lease_ends_without_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Longer than the time to a turn: one that was due before the lease began does not see its end.
    monkeypatch.setattr(kv_holds, "HOLD_LEASE_SECONDS", 1.5)
    async with local_supervisor(kv_transfer="auto") as (supervisor, node):
        client = supervisor.client
        handoff = KvHandoff(make_ticket())
        stream = client.submit(list(range(300, 340)), GREEDY, 1, [], handoff=handoff)
        await until(lambda: not stream.alive)
        client.release(stream)
        # The last report of the engine: nobody sends it a message from now on, so that it notices
        # the end of the lease in a turn that it takes by itself.
        assert client.stats.held_blocks > 0
        (worker,) = node.workers.values()
        instance = worker.instance
        assert instance is not None
        assert instance.has_leases
        await until(lambda: client.stats.held_blocks == 0)
        assert client.stats.kv_usage == 0
        await until(lambda: not instance.has_leases)


async def test_blocks_return_when_another_mover_takes_over() -> None:
    async with local_supervisor(kv_transfer="auto") as (supervisor, node):
        client = supervisor.client
        handoff = KvHandoff(make_ticket())
        stream = client.submit(list(range(300, 340)), GREEDY, 1, [], handoff=handoff)
        await until(lambda: not stream.alive)
        client.release(stream)
        assert client.stats.held_blocks > 0
        (worker,) = node.workers.values()
        assert worker.instance is not None
        driver_end, mover_end = create_channels()
        worker.instance.connect_kv_mover(driver_end)
        await until(lambda: client.stats.held_blocks == 0)
        # The next blocks are served by this mover, until its end of the channel is closed.
        stream = client.submit(list(range(300, 340)), GREEDY, 1, [], handoff=handoff)
        await until(lambda: not stream.alive)
        client.release(stream)
        command = decode_for_kv_mover(mover_end.receive()[0])
        assert isinstance(command, ServeKv)
        assert command.ticket == handoff.ticket
        assert client.stats.held_blocks == len(command.block_ids)
        mover_end.close()
        await until(lambda: client.stats.held_blocks == 0)
