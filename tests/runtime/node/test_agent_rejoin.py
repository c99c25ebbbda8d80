"""Agents that lose their head: workers survive, stages do not; and when they give up."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from gllm.messages.lifecycle import (
    EpochClosed,
    Hello,
    InitializeCache,
    StageLoaded,
    StageReady,
)
from gllm.messages.nodes import NodeLoad, StartWorker, WorkerExited
from gllm.models.config import read_config
from gllm.models.hub import DEMO
from gllm.runtime.head.node import LocalNode
from tests.support.nodes.agent_head import (
    SECONDS,
    FakeHead,
    RunningAgent,
    head_and_agent,
    two_stages,
    until,
)


def replace_welcome(head: FakeHead, **changes: object) -> None:
    head.welcome = msgspec.structs.replace(head.welcome, **changes)


async def lose_session(head: FakeHead, agent: RunningAgent) -> None:
    """End the session as a reset of the connection would."""
    num_joins = len(head.joins)
    head.hub.forget(head.agent)
    await until(lambda: len(head.joins) > num_joins)


async def test_workers_survive_the_loss_of_the_session() -> None:
    async with head_and_agent() as (head, agent):
        await head.start_workers(2, 3, 4)
        head.assign(two_stages(1))
        await until(lambda: head.from_worker(2, StageLoaded))
        replace_welcome(head, workers=[2, 3])
        head.messages.clear()
        await lose_session(head, agent)
        join = head.joins[-1]
        assert (join.workers, join.run) == ([2, 3, 4], head.run)
        assert agent.links.closed[-1] == 1
        assert not agent.node.driver_address
        await until(lambda: head.from_worker(2, Hello) and head.from_worker(3, Hello))
        assert not head.from_worker(4, Hello)
        assert agent.node.killed == [4], "the head does not want it"
        assert agent.node.num_spawned == 3
        # The same process serves the next epoch.
        head.assign(two_stages(2))
        await until(lambda: head.from_worker(2, StageLoaded))
        assert head.from_worker(2, StageLoaded)[0][0] == 2
        assert not head.of(WorkerExited)
        assert agent.agent.status().num_sessions == 2


async def test_a_worker_that_dies_meanwhile_is_reported_after_the_welcome() -> None:
    async with head_and_agent() as (head, agent):
        await head.start_workers(2, 3)
        head.answer = lambda join: None
        await lose_session(head, agent)
        assert head.joins[-1].workers == [2, 3]
        agent.node.exit(2, "was killed by SIGKILL")
        await until(lambda: agent.agent.status().num_workers == 1)
        await asyncio.sleep(0.1)
        assert not head.of(WorkerExited), "this machine is no member"
        replace_welcome(head, workers=[2, 3])
        head.send(head.welcome)
        [exited] = await until(lambda: head.of(WorkerExited))
        assert exited.sender == 2
        await until(lambda: head.from_worker(3, Hello))


async def test_a_worker_that_does_not_close_its_stage_is_killed() -> None:
    async with head_and_agent(close_seconds=0.2) as (head, agent):
        await head.start_workers(2, 3)
        head.assign(two_stages(1))
        await until(lambda: head.from_worker(2, StageLoaded))
        agent.node.workers[2].is_frozen = True
        await lose_session(head, agent)
        assert agent.node.killed[0] == 2
        assert head.joins[-1].workers == [3]


async def test_a_silent_head_is_lost() -> None:
    async with head_and_agent() as (head, agent):
        await head.start_workers(2)
        await until(lambda: head.beats)
        head.answers_heartbeats = False
        await until(lambda: agent.state == "disconnected" or len(head.joins) > 1)
        await until(lambda: len(head.joins) > 1)
        assert "silent" in agent.agent.status().cause or agent.state == "member"
        assert head.joins[-1].workers == [2]


async def test_heartbeats_that_fail_end_the_session(caplog: pytest.LogCaptureFixture) -> None:
    async with head_and_agent() as (head, agent):

        def fail() -> NodeLoad:
            agent.read_load = NodeLoad
            raise OSError("no sensor")

        agent.read_load = fail
        await until(lambda: len(head.joins) > 1)
        await until(lambda: agent.state == "member")
        assert "no sensor" in caplog.text


async def test_another_head_gets_other_workers() -> None:
    async with head_and_agent() as (head, agent):
        await head.start_workers(2, 3)
        head.assign(two_stages(5))
        await until(lambda: head.from_worker(2, StageLoaded))
        first = agent.node.workers[2]
        replace_welcome(head, run=head.run + 1, workers=[])
        head.messages.clear()
        await lose_session(head, agent)
        assert head.joins[-1].run == head.run
        await until(lambda: sorted(agent.node.killed) == [2, 3])
        # The new head counts senders and epochs from the beginning.
        head.run += 1
        await head.start_workers(2)
        assert agent.links.run == head.run
        assert agent.node.workers[2] is not first
        head.assign(two_stages(1))
        await until(lambda: head.from_worker(2, StageLoaded))
        assert not head.of(WorkerExited), "those of the old run are none of the new one's"
        assert not head.from_worker(2, EpochClosed)


async def test_without_a_head_the_agent_ends_in_time() -> None:
    head = FakeHead()
    replace_welcome(head, recovery_timeout=0.7)
    agent = RunningAgent(head)
    await until(lambda: agent.state == "member")
    await head.start_workers(2)
    await head.close()
    await until(lambda: agent.state == "disconnected")
    assert agent.agent.status().is_healthy
    assert agent.agent.status().num_workers == 1
    assert await agent.ended() == 1
    assert not agent.node.workers
    status = agent.agent.status()
    assert head.address in status.cause
    assert not status.is_healthy


async def test_commands_wait_until_the_model_is_found() -> None:
    head = FakeHead()
    agent = RunningAgent(head)
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def find(name: str, digest: str) -> Path:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(SECONDS)
        return Path("folder")

    agent.find_model = find
    await until(lambda: head.joins)
    head.send(StartWorker(2, "warning", "text"))
    head.assign(two_stages(1))
    await asyncio.sleep(0.1)
    assert not agent.node.workers
    release.set()
    await until(lambda: head.from_worker(2, StageLoaded))
    # The next session finds it at once.
    await lose_session(head, agent)
    await until(lambda: agent.state == "member")
    agent.agent.leave("the test ends")
    assert await agent.ended() == 0
    await head.close()


@pytest.mark.full
async def test_real_workers_keep_their_weights() -> None:
    head = FakeHead()
    node = LocalNode(1, node_name="b")
    agent = RunningAgent(head, node=node)
    agent.folder = DEMO
    num_layers = len(read_config(DEMO).model.layers)
    await until(lambda: head.joins)
    await head.start_workers(2)
    pid = node.workers[2].process.pid
    for epoch in (1, 2):
        head.assign(two_stages(epoch, num_layers=num_layers))
        await until(lambda: head.from_worker(2, StageLoaded))
        head.send_to_worker(2, InitializeCache(64), epoch)
        # The stage has connected to the stand-in of the driver.
        await until(lambda: head.from_stage(2) and head.from_worker(2, StageReady))
        assert head.from_stage(2)[0].epoch == epoch
        replace_welcome(head, workers=[2])
        head.messages.clear()
        await lose_session(head, agent)
        assert head.joins[-1].workers == [2]
        await until(lambda: head.from_worker(2, Hello))
    assert node.workers[2].process.pid == pid
    agent.agent.leave("the test ends")
    assert await agent.ended() == 0
    assert not node.processes
    await head.close()


AGENT_PROCESS = """
import asyncio, signal, sys
from pathlib import Path
from gllm.messages.nodes import NodeFacts
from gllm.runtime.node.agent import Agent
from gllm.runtime.node.head_session import AgentConfig
from gllm.runtime.head.link_process import LinkProcess
from gllm.runtime.head.node import LocalNode

async def main():
    facts = NodeFacts("b", "", "", "127.0.0.1", 0, "", b"", [], 1, 1)
    config = AgentConfig(sys.argv[1], "b", rank=1)
    node = LocalNode(1, node_name="b")
    agent = Agent(config, facts, node, LinkProcess("b", ""), lambda name, digest: Path(sys.argv[2]))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, agent.leave, "SIGTERM")
    return await agent.run()

sys.exit(asyncio.run(main()))
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
async def test_no_worker_process_outlives_its_agent(end: signal.Signals, tmp_path: Path) -> None:
    head = FakeHead()
    command = [sys.executable, "-c", AGENT_PROCESS, head.address, str(tmp_path)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        await until(lambda: head.joins)
        head.send(StartWorker(2, "warning", "text"))
        children = await until(lambda: psutil.Process(process.pid).children())
        process.send_signal(end)
        status = await asyncio.to_thread(process.wait, SECONDS)
        assert status == (0 if end == signal.SIGTERM else -signal.SIGKILL)
        begin = time.monotonic()
        while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in children):
            assert time.monotonic() - begin < SECONDS
            await asyncio.sleep(0.01)
        await until(lambda: head.num_lost)
    finally:
        process.kill()
        process.wait()
        await head.close()
