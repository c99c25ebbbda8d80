"""An engine over the machines of scripted agents: start, losses, returns, spares, edges, rules."""

import asyncio
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from gllm.messages.codec import encode
from gllm.messages.lifecycle import Heartbeat, Hello, StageFailed, StageReady
from gllm.messages.nodes import (
    AssignmentFailed,
    DumpStacks,
    EdgeLost,
    EdgeOpened,
    EngineState,
    EpochReady,
    LeaveCluster,
    NodeHeartbeat,
    StartWorker,
    WelcomeNode,
    WorkerFrame,
    WorkerSample,
    WorkerSessionLost,
)
from gllm.recovery.liveness import ProcessSample
from gllm.recovery.placement import RankWorker, make_placement
from gllm.recovery.records import RecoveryState
from gllm.runtime.head.event_receiver import LivenessWatch
from gllm.runtime.head.node_group import RemoteNode
from gllm.runtime.head.supervisor import EngineError
from gllm.transport.link.commands import LinkPeer
from tests.runtime.head.test_supervisor import generate
from tests.support.nodes.fake_agent import NODE_FACTS, until
from tests.support.nodes.scripted_agent import ClusterUnderTest, ScriptedAgent, cluster_of
from tests.support.nodes.scripted_node import token_of

PROMPT = [3, 5, 8]


def expected(max_tokens: int) -> list[int]:
    return [token_of(PROMPT, 0, index) for index in range(max_tokens)]


async def start(end: ClusterUnderTest, *ranks: int) -> list[ScriptedAgent]:
    """Start the engine with an agent for each rank, named by it."""
    starting = asyncio.create_task(end.start())
    agents = [await end.dial(f"node{rank}", rank) for rank in ranks]
    await starting
    return agents


async def test_stages_run_on_both_machines() -> None:
    async with cluster_of() as end:
        (agent,) = await start(end, 1)
        tokens, errors = await generate(end.supervisor, PROMPT)
        assert (tokens, errors) == ([expected(20)], [""])
        assert len(agent.workers) == end.node.num_spawned == 1
        assignment = agent.assignments[0]
        assert [each.node for each in assignment.placement.workers] == ["local", "node1"]
        assert assignment.peers["node1"].address == "127.0.0.1:29601"
        assert assignment.peers["local"] == LinkPeer("head", "", b"")
        await until(lambda: agent.of(EngineState)[-1:] == [EngineState("ready", "", 1)])
        assert agent.of(EpochReady) == [EpochReady(1)]
        stages = end.supervisor.node_stages
        head, other = end.cluster.reports(stages)
        assert (head.name, head.rank, head.state, head.stages) == ("head", 0, "member", [0])
        assert (other.name, other.rank, other.state, other.stages) == ("node1", 1, "member", [1])
        assert other.load.cpu_utilization == 0.5
    assert agent.of(LeaveCluster) == [LeaveCluster("the engine was stopped")]
    assert not agent.workers


async def test_a_machine_that_leaves_is_not_called_lost(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster_of() as end:
        await start(end, 1)
        spare = await end.dial("spare")
        spare.send(LeaveCluster("it got SIGTERM"))
        await until(lambda: "has left" in caplog.text)
        assert "node spare (127.0.0.1) has left: it got SIGTERM" in caplog.text
    assert "was lost" not in caplog.text


async def test_stages_start_when_their_edges_are_connected() -> None:
    async with cluster_of() as end:
        starting = asyncio.create_task(end.start())
        agent = await end.dial("node1", 1)
        agent.opens_edges = False
        await until(lambda: agent.assignments)
        # The head has handled what the worker sent when it answers what was sent later.
        num_beats = len(agent.messages)
        await until(lambda: len(agent.messages) > num_beats + 10)
        assert not agent.of(WorkerFrame)
        assert not end.node.block_counts
        # Of another epoch, and an edge that does not exist.
        agent.send(EdgeOpened(7, 0))
        agent.send(EdgeOpened(1, 9))
        agent.open_edges()
        await starting
        assert end.supervisor.state == "ready"


@pytest.mark.parametrize("is_death", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_requests_survive_the_loss_and_return_of_a_machine(is_death: bool) -> None:
    async with cluster_of() as end:
        (agent,) = await start(end, 1)
        running = asyncio.create_task(generate(end.supervisor, PROMPT, 200))
        await until(lambda: end.supervisor.client.stats.running)
        if is_death:
            agent.close()
            await until(lambda: not end.cluster.hub.sessions)
        else:
            end.cluster.hub.lose(end.cluster.hub.sessions["node1"], "no message for 5 seconds")
        await until(lambda: end.supervisor.state == "recovering")
        assert "node1" in end.supervisor.state_cause
        lost = end.cluster.reports(end.supervisor.node_stages)[1]
        assert (lost.state, lost.num_losses, lost.stages) == ("lost", 1, [])
        assert lost.last_cause in end.supervisor.state_cause
        assert lost.load.cpu_utilization is None
        fields = {} if is_death else {"run": end.cluster.run, "workers": sorted(agent.workers)}
        again = await end.dial("node1", 1, **fields)
        assert await running == ([expected(200)], [""])
        assert again.of(WelcomeNode)[0].workers == fields.get("workers", [])
        # Workers that return with their node are used again.
        assert len(again.of(StartWorker)) == is_death
        assert end.node.num_spawned == 1
        assert end.supervisor.deaths.recoveries == {"node": 1}
        assert end.cluster.num_losses == 1


async def test_workers_of_another_run_are_not_kept() -> None:
    async with cluster_of() as end:
        (agent,) = await start(end, 1)
        workers = sorted(agent.workers)
        agent.close()
        await until(lambda: not end.cluster.hub.sessions)
        again = await end.dial("node1", 1, run=end.cluster.run ^ 1, workers=workers)
        await until(lambda: end.supervisor.state == "ready" and again.assignments)
        assert again.of(WelcomeNode)[0].workers == []


async def test_a_spare_takes_the_place_at_once() -> None:
    async with cluster_of(node_return_timeout=600.0) as end:
        (agent,) = await start(end, 1)
        spare = await end.dial("spare", is_spare=True)
        await until(lambda: spare.is_welcome)
        assert not spare.of(StartWorker)
        running = asyncio.create_task(generate(end.supervisor, PROMPT, 200))
        await until(lambda: end.supervisor.client.stats.running)
        agent.close()
        assert await running == ([expected(200)], [""])
        assert end.supervisor.node_stages == {"local": [0], "spare": [1]}
        # The node that returns has no stages any more.
        again = await end.dial("node1", 1)
        await until(lambda: again.is_welcome)
        assert not again.of(StartWorker)
        states = {each.name: each.state for each in end.cluster.reports({})}
        assert states["node1"] == "spare"


async def test_a_lost_edge_begins_another_epoch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with cluster_of() as end:
        (agent,) = await start(end, 1)
        for epoch in (1, 2):
            # Both ends report it.
            agent.send(EdgeLost(epoch, 0, "no route"))
            agent.send(EdgeLost(epoch, 0, "no route"))
            await until(lambda: len(agent.assignments) > epoch)  # noqa: B023
            await until(lambda: end.supervisor.state == "ready")
            assert ("twice within" in caplog.text) == (epoch == 2)
        assert end.supervisor.deaths.recoveries == {"link": 2}
        assert len(agent.workers) == 1
        assert await generate(end.supervisor, PROMPT) == ([expected(20)], [""])


async def test_machines_that_lose_each_other_twice_are_no_neighbours() -> None:
    async with cluster_of() as end:
        (agent,) = await start(end, 1)
        agent.send(EdgeLost(1, 0, "no route"))
        await until(lambda: len(agent.assignments) == 2)
        await until(lambda: end.supervisor.state == "ready")
        assert end.supervisor.node_stages == {"local": [0], "node1": [1]}
        spare = await end.dial("spare", is_spare=True)
        await until(lambda: spare.is_welcome)
        running = asyncio.create_task(generate(end.supervisor, PROMPT, 200))
        await until(lambda: end.supervisor.client.stats.running)
        agent.send(EdgeLost(2, 0, "no route"))
        assert await running == ([expected(200)], [""])
        assert end.supervisor.node_stages == {"local": [0], "spare": [1]}
        # The other node is a spare now, and takes the stages in turn.
        await until(lambda: not agent.workers)
        assert not agent.lost
        spare.close()
        await until(lambda: len(agent.assignments) == 3)
        assert await generate(end.supervisor, PROMPT) == ([expected(20)], [""])


async def test_an_assignment_that_fails_on_an_agent_is_repeated() -> None:
    async with cluster_of() as end:
        starting = asyncio.create_task(end.start())
        agent = await end.dial("node1", 1)
        agent.opens_edges = False
        await until(lambda: agent.assignments)
        agent.opens_edges = True
        agent.send(AssignmentFailed(1, "no descriptor is left"))
        await starting
        assert end.supervisor.recovery.epoch == 2


async def test_a_remote_worker_that_exits_is_replaced_on_its_machine() -> None:
    async with cluster_of() as end:
        (agent,) = await start(end, 1)
        (sender,) = agent.workers
        agent.exit(sender)
        await until(lambda: len(agent.of(StartWorker)) == 2)
        await until(lambda: end.supervisor.state == "ready")
        assert end.supervisor.deaths.recoveries == {"killed": 1}
        assert "on node node1" in end.supervisor.deaths.cause
        (sender,) = agent.workers
        agent.send(WorkerSessionLost(sender, "the connection was closed"))
        await until(lambda: len(agent.of(StartWorker)) == 3)
        await until(lambda: end.supervisor.state == "ready")
        assert end.supervisor.deaths.recoveries == {"killed": 1, "lost": 1}
        (sender,) = agent.workers
        agent.say(sender, StageFailed(1, "the device is gone"))
        await until(lambda: len(agent.of(StartWorker)) == 4)


async def test_the_driver_dies_and_the_other_machine_keeps_its_worker() -> None:
    async with cluster_of() as end:
        (agent,) = await start(end, 1)
        running = asyncio.create_task(generate(end.supervisor, PROMPT, 200))
        await until(lambda: end.supervisor.client.stats.running)
        end.node.crash(0)
        assert await running == ([expected(200)], [""])
        assert len(agent.of(StartWorker)) == 1
        assert [each.placement.epoch for each in agent.assignments] == [1, 2]


async def test_stale_and_foreign_frames_change_nothing() -> None:
    async with cluster_of(num_nodes=3, num_stages=3) as end:
        first, second = await start(end, 1, 2)
        before = end.supervisor.num_stale_frames
        (own,), (other,) = first.workers, second.workers
        failed = encode(StageFailed(1, "it failed"))
        first.send(WorkerFrame(own, 0, failed))
        first.send(WorkerFrame(own, 2, failed))
        # Workers of another node, of the head, and none at all.
        for sender in (other, end.supervisor.senders[0], 99):
            first.send(WorkerFrame(sender, 1, failed))
            first.send(WorkerSessionLost(sender, "lost"))
        # Edge 0 connects the head and the first node, and there is no third edge.
        second.send(EdgeLost(1, 0, "no route"))
        second.send(EdgeLost(1, 2, "no route"))
        await until(lambda: end.supervisor.num_stale_frames >= before + 10)
        assert end.supervisor.num_stale_frames == before + 10
        assert end.supervisor.state == "ready"
        assert end.supervisor.recovery.epoch == 1
        assert not first.lost


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        pytest.param(encode(Hello(99)), marks=pytest.mark.full),
        pytest.param(encode(StartWorker(1, "info", "text")), marks=pytest.mark.full),
        pytest.param(encode(StageReady(1))[:-1], marks=pytest.mark.full),
    ],
)
async def test_a_worker_frame_that_no_worker_may_send_ends_the_session(payload: bytes) -> None:
    async with cluster_of() as end:
        (agent,) = await start(end, 1)
        (sender,) = agent.workers
        agent.send(WorkerFrame(sender, 1, payload))
        await until(lambda: agent.lost)
        assert end.cluster.hub.num_malformed == 1
        await end.dial("node1", 1)
        await until(lambda: end.supervisor.state == "ready")
        assert end.supervisor.recovery.epoch == 2


class Nodes:
    """Nodes whose only worker is stopped."""

    is_node_silent = True

    def sample(self, sender: int) -> ProcessSample:
        return ProcessSample(is_stopped=True, cpu_seconds=0.0)

    def is_silent(self, sender: int) -> bool:
        return self.is_node_silent

    def dump_stacks(self, sender: int) -> None:
        pass

    def read_stacks(self, sender: int) -> str:
        return ""


async def test_workers_of_a_silent_machine_are_not_watched() -> None:
    frozen: list[int] = []
    nodes: Any = Nodes()
    recovery: Any = SimpleNamespace(state=RecoveryState.READY, is_exiting=lambda sender: False)
    watch = LivenessWatch(
        recovery, nodes, 0.1, lambda sender, cause: frozen.append(sender), nodes.is_silent
    )
    watch.watch(make_placement(1, [(0, 1)], [RankWorker(5)]))
    await asyncio.sleep(0.6)
    assert not frozen
    nodes.is_node_silent = False
    await until(lambda: frozen)
    assert set(frozen) == {5}
    watch.close()


@pytest.mark.parametrize(("age", "is_silent"), [(1.0, False), (4.0, True)])
def test_a_machine_is_silent_after_missed_heartbeats(age: float, is_silent: bool) -> None:
    """They are sent each second."""
    session: Any = SimpleNamespace(name="node1", last_heard=time.monotonic() - age)
    assert RemoteNode(session).is_silent == is_silent


@pytest.mark.full
async def test_workers_of_a_silent_machine_are_not_frozen_one_by_one() -> None:
    """The node is silent for longer than a worker may be stopped, but not lost yet."""
    async with cluster_of(node_timeout=5.0, freeze_timeout=3.0) as end:
        (agent,) = await start(end, 1)
        (sender,) = agent.workers
        agent.say(sender, Heartbeat(-1, 0.0, 0, 0.0))
        await until(lambda: sender in end.supervisor.deaths.heartbeats)
        agent.stop_beating()
        now = time.monotonic()
        agent.send(NodeHeartbeat(now, 0.0, now, [WorkerSample(sender, True, 0.0)]))
        await until(lambda: end.supervisor.state == "recovering")
        assert end.supervisor.deaths.recoveries == {"node": 1}
        assert not agent.of(DumpStacks)


async def test_an_engine_that_fails_lets_its_agents_fail(tmp_path: Path) -> None:
    async with cluster_of(crash_folder=str(tmp_path)) as end:
        starting = asyncio.create_task(end.start())
        agent = await end.dial("node1", 1)
        end.node.failures_at_load[0] = "the model cannot be read"
        with pytest.raises(EngineError, match="the model cannot be read"):
            await starting
        await until(lambda: agent.of(LeaveCluster))
        assert agent.of(LeaveCluster)[0].is_failure


async def test_machines_that_cannot_reach_each_other_are_named(tmp_path: Path) -> None:
    async with cluster_of(max_restarts=1, crash_folder=str(tmp_path)) as end:
        starting = asyncio.create_task(end.start())
        # Neither of them accepts data connections.
        await end.dial("node1", 1, facts=replace(NODE_FACTS, data_port=0))
        with pytest.raises(EngineError, match=r"'head'.*'node1'.*--advertise"):
            await starting
