"""Agents: joining, commands, frames in both directions, clocks, and how the membership ends."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from gllm.messages.codec import decode_for_driver, decode_for_stage, encode
from gllm.messages.lifecycle import (
    CloseEpoch,
    EpochClosed,
    InitializeCache,
    StageFailed,
    StageLoaded,
    StageReady,
)
from gllm.messages.nodes import (
    AssignmentFailed,
    AssignStages,
    DumpStacks,
    EdgeLost,
    EdgeOpened,
    EndWorker,
    EngineState,
    EpochReady,
    JoinCluster,
    LeaveCluster,
    RefuseNode,
    StageFrame,
    StartWorker,
    WorkerExited,
    WorkerSessionLost,
    WorkerStacks,
)
from gllm.messages.reports import StageTimes
from gllm.messages.steps import GrammarReady, RunStep
from gllm.runtime.messaging.bus import Spoke
from gllm.runtime.messaging.security import create_secret_file
from gllm.scheduler.plan import StepPlan, StepTime
from tests.support.nodes.agent_head import (
    FACTS,
    SECONDS,
    FakeHead,
    RunningAgent,
    head_and_agent,
    two_stages,
    until,
)


class Stage:
    """The session of a scripted worker with the driver."""

    def __init__(self, head: FakeHead, agent: RunningAgent, sender: int, epoch: int) -> None:
        self.messages: list[Any] = []
        self.lost: list[str] = []
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = agent.node.driver_address
        self.spoke = Spoke(self.context, head.run, sender, address, decode_for_stage)
        self.spoke.advance(epoch)
        self.spoke.start(self.messages.extend, self.lost.append)

    def close(self) -> None:
        self.spoke.close()
        self.context.term()


@pytest.mark.parametrize("has_secret", [False, True])
async def test_a_member_passes_messages_on_in_both_directions(
    has_secret: bool, tmp_path: Path
) -> None:
    secret = tmp_path / "secret" if has_secret else None
    if secret is not None:
        create_secret_file(secret)
    async with head_and_agent(secret, model_hash="hash", engine_config=b"{}") as (head, agent):
        [join] = head.joins
        assert (join.name, join.rank, join.model_hash, join.config) == ("b", 1, "hash", b"{}")
        assert (join.facts, join.workers, join.run) == (FACTS, [], 0)
        await head.start_workers(2, 3)
        assert agent.lookups == [("demo", "hash")]
        head.assign(two_stages(1))
        await until(lambda: head.from_worker(2, StageLoaded))
        assert head.from_worker(2, StageLoaded)[0][0] == 1, "the epoch of the message"
        [opened] = agent.links.opened
        command = opened.epoch, opened.edge, opened.is_sender, opened.dials
        assert command == (1, 0, False, False)
        assert opened.peer.node == "local"
        agent.links.on_opened(1, 0)
        await until(lambda: head.of(EdgeOpened))
        head.send_to_worker(2, InitializeCache(12), 1)
        await until(lambda: head.from_worker(2, StageReady))
        assert agent.node.block_counts == [12]

        stage = Stage(head, agent, 2, 1)
        await until(lambda: head.from_stage(2))
        assert head.from_stage(2)[0] == StageFrame(2, 1, b"")
        head.send(EpochReady(1))
        await until(lambda: not agent.node.driver_address)
        plan = RunStep(StepPlan(4, [], []))
        head.send(StageFrame(2, 1, encode(plan)))
        await until(lambda: stage.messages)
        assert stage.messages == [plan]
        stage.spoke.send(GrammarReady(9))
        await until(lambda: len(head.from_stage(2)) == 2)
        assert decode_for_driver(head.from_stage(2)[1].payload) == GrammarReady(9)

        await until(lambda: head.beats and len(head.beats[-1].samples) == 2)
        assert [each.sender for each in head.beats[-1].samples] == [2, 3]
        head.send_to_worker(2, CloseEpoch(), 1)
        await until(lambda: head.from_worker(2, EpochClosed))
        await until(lambda: stage.lost)
        assert 1 in agent.links.closed
        stage.close()
        assert not head.of(WorkerSessionLost)
        assert not head.of(WorkerExited)


async def test_step_times_arrive_by_the_clock_of_the_head() -> None:
    async with head_and_agent() as (head, agent):
        head.clock_ahead = 5000.0
        await head.start_workers(2)
        head.assign(two_stages(1))
        await until(lambda: head.from_worker(2, StageLoaded))
        stage = Stage(head, agent, 2, 1)
        await until(lambda: agent.agent.status().clock_offset_seconds)
        offset = await until(
            lambda: (ahead := agent.agent.status().clock_offset_seconds or 0.0) > 4999.0 and ahead
        )
        assert offset == pytest.approx(5000.0, abs=1.0)
        now = time.monotonic()
        stage.spoke.send(StageTimes(1, [StepTime(3, now - 1.0, now)], now + 0.5))
        await until(lambda: len(head.from_stage(2)) == 2)
        times = decode_for_driver(head.from_stage(2)[1].payload)
        assert isinstance(times, StageTimes)
        assert times.complete_until == pytest.approx(now + 0.5 + 5000.0, abs=1.0)
        [step] = times.steps
        assert step.step == 3
        assert step.end - step.start == pytest.approx(1.0)
        assert times.complete_until - step.end == pytest.approx(0.5)
        # A later report never begins before the end of an earlier one.
        stage.spoke.send(StageTimes(1, [StepTime(4, now, now + 1.0)], now + 1.0))
        await until(lambda: len(head.from_stage(2)) == 3)
        later = decode_for_driver(head.from_stage(2)[2].payload)
        assert isinstance(later, StageTimes)
        assert later.steps[0].start == times.complete_until
        stage.close()


async def test_exits_and_stacks_are_reported() -> None:
    async with head_and_agent() as (head, agent):
        await head.start_workers(2, 3)
        head.send(DumpStacks(3))
        await until(lambda: head.of(WorkerStacks))
        assert head.of(WorkerStacks) == [WorkerStacks(3, "Thread of worker 3")]
        head.assign(two_stages(1))
        await until(lambda: head.from_worker(2, StageLoaded))
        worker = agent.node.workers[2]
        worker.send(StageFailed(1, "out of memory"))
        await asyncio.sleep(0)
        agent.node.exit(2, "exited with 1")
        [exited] = await until(lambda: head.of(WorkerExited))
        assert (exited.sender, exited.stacks) == (2, "Thread of worker 2")
        assert "exited with 1" in exited.description
        failed = head.from_worker(2, StageFailed)
        assert [each.cause for _, each in failed] == ["out of memory"], "before the exit"
        head.send(EndWorker(3))
        await until(lambda: len(head.of(WorkerExited)) == 2)
        assert agent.node.killed == [3]
        agent.node.spawn_errors = 1
        head.send(StartWorker(4, "warning", "text"))
        await until(lambda: len(head.of(WorkerExited)) == 3)
        assert "no process is left" in head.of(WorkerExited)[2].description
        await head.start_workers(5)


async def test_frames_of_other_epochs_are_dropped_and_counted() -> None:
    async with head_and_agent() as (head, agent):
        await head.start_workers(2)
        head.assign(two_stages(3))
        await until(lambda: head.from_worker(2, StageLoaded))
        before = agent.agent.status().num_stale_frames
        head.send_to_worker(2, InitializeCache(1), 2)
        head.send_to_worker(2, InitializeCache(2), 4)
        head.send(StageFrame(2, 2, encode(RunStep(StepPlan(1, [], [])))))
        head.send_to_worker(2, InitializeCache(3), 3)
        await until(lambda: agent.node.block_counts)
        assert agent.node.block_counts == [3]
        assert agent.agent.status().num_stale_frames == before + 3
        head.assign(two_stages(3))
        [failed] = await until(lambda: head.of(AssignmentFailed))
        assert failed.epoch == 3
        head.send(AssignStages(5, b"no JSON"))
        await until(lambda: len(head.of(AssignmentFailed)) == 2)


async def test_a_probe_is_no_epoch() -> None:
    async with head_and_agent() as (head, agent):
        await head.start_workers(2)
        head.send(EngineState("ready", "", 0))
        await until(lambda: agent.state == "spare")
        head.assign(two_stages(1), is_probe=True)
        await until(lambda: agent.state == "member")
        assert not agent.node.driver_address
        head.assign(two_stages(1))
        await until(lambda: agent.node.driver_address)
        assert not head.of(AssignmentFailed)


async def test_edges_are_lost_aloud() -> None:
    async with head_and_agent() as (head, agent):
        assert agent.links.run == head.run
        agent.links.on_lost(4, 2, "no route")
        [lost] = await until(lambda: head.of(EdgeLost))
        assert lost == EdgeLost(4, 2, "no route")


async def test_a_stage_session_that_ends_alone_is_reported() -> None:
    async with head_and_agent(lost_seconds=0.05) as (head, agent):
        await head.start_workers(2)
        head.assign(two_stages(1))
        await until(lambda: head.from_worker(2, StageLoaded))
        stage = Stage(head, agent, 2, 1)
        await until(lambda: head.from_stage(2))
        stage.close()
        [lost] = await until(lambda: head.of(WorkerSessionLost))
        assert lost.sender == 2
        assert "with the driver" in lost.cause


async def test_state_follows_the_engine() -> None:
    async with head_and_agent() as (head, agent):
        await head.start_workers(2)
        assert agent.agent.status().num_workers == 1
        head.send(EngineState("ready", "", 1))
        await until(lambda: agent.agent.status().is_ready)
        assert agent.state == "spare", "it has no stage"
        head.assign(two_stages(2))
        await until(lambda: agent.state == "member")
        head.send(EngineState("recovering", "a worker died", 2))
        await until(lambda: not agent.agent.status().is_ready)
        assert agent.agent.status().cause == "a worker died"
        assert agent.agent.status().is_healthy


async def test_a_final_refusal_ends_the_agent() -> None:
    head = FakeHead()
    head.answer = lambda join: RefuseNode("dtype is float16 on the node")
    agent = RunningAgent(head)
    assert await agent.ended() == 2
    status = agent.agent.status()
    assert (status.state, status.is_healthy) == ("ended", False)
    assert "dtype is float16" in status.cause
    await head.close()


async def test_a_refusal_for_now_is_tried_again() -> None:
    head = FakeHead()

    def answer(join: JoinCluster) -> Any:
        return head.welcome if len(head.joins) > 2 else RefuseNode("not lost yet", False)

    head.answer = answer
    agent = RunningAgent(head)
    await until(lambda: agent.state == "member")
    assert len(head.joins) == 3
    assert len({each.agent for each in head.joins}) == 1
    agent.agent.leave("the test ends")
    assert await agent.ended() == 0
    await head.close()


async def test_no_head_ends_the_agent_in_time() -> None:
    head = FakeHead()
    await head.close()
    agent = RunningAgent(head, join_timeout=0.5)
    assert agent.state == "joining"
    assert await agent.ended() == 1
    assert head.address in agent.agent.status().cause


async def test_a_head_that_never_answers_ends_the_agent_in_time() -> None:
    head = FakeHead()
    head.answer = lambda join: None
    agent = RunningAgent(head, join_timeout=0.5)
    assert await agent.ended() == 1
    assert "has not answered" in agent.agent.status().cause
    await head.close()


async def test_another_secret_is_no_member(tmp_path: Path) -> None:
    create_secret_file(tmp_path / "secret")
    create_secret_file(tmp_path / "other")
    head = FakeHead(tmp_path / "secret")
    agent = RunningAgent(head, node_secret_file=str(tmp_path / "other"), join_timeout=0.5)
    assert await agent.ended() == 1
    assert "secret" in agent.agent.status().cause
    assert head.hub.refused.num_refused
    assert not head.joins
    await head.close()


async def test_without_a_secret_only_loopback_is_dialled() -> None:
    head = FakeHead()
    agent = RunningAgent(head, head="192.0.2.1:29600")
    assert await agent.ended() == 2
    assert "--node-secret-file" in agent.agent.status().cause
    await head.close()


async def test_leaving_notifies_the_head_and_ends_the_workers() -> None:
    async with head_and_agent() as (head, agent):
        await head.start_workers(2)
        agent.agent.leave("SIGTERM")
        assert await agent.ended() == 0
        [left] = await until(lambda: head.of(LeaveCluster))
        assert left == LeaveCluster("SIGTERM", False)
        assert not agent.node.workers
        await until(lambda: head.num_lost)


async def assigned(head: FakeHead) -> None:
    """Wait until the agent has a stage."""
    await head.start_workers(2)
    head.assign(two_stages(1))
    await until(lambda: head.from_worker(2, StageLoaded))


async def test_an_agent_stays_until_the_head_that_drains_has_finished() -> None:
    async with head_and_agent() as (head, agent):
        await assigned(head)
        head.send(EngineState("draining", "", 1))
        await until(lambda: agent.agent.status().engine_state == "draining")
        agent.agent.leave("SIGTERM")
        num_beats = len(head.beats)
        await until(lambda: len(head.beats) > num_beats + 1)
        assert agent.node.workers, "requests need its layers"
        assert not head.of(LeaveCluster)
        head.send(LeaveCluster("it was stopped"))
        assert await agent.ended() == 0
        assert not head.of(LeaveCluster), "the head knows"


async def test_an_agent_waits_for_the_signal_of_its_head() -> None:
    async with head_and_agent(settle_seconds=SECONDS) as (head, agent):
        await assigned(head)
        agent.agent.leave("SIGTERM")
        head.send(EngineState("draining", "", 1))
        await until(lambda: agent.agent.status().engine_state == "draining")
        assert agent.node.workers
        head.hub.forget(head.agent)
        assert await agent.ended() == 0, "the head is gone"


@pytest.mark.parametrize("is_failure", [False, True])
async def test_the_head_ends_the_agent(is_failure: bool) -> None:
    async with head_and_agent() as (head, agent):
        await head.start_workers(2, 3)
        head.send(LeaveCluster("the engine ends", is_failure))
        assert await agent.ended() == int(is_failure)
        assert not agent.node.workers
        assert agent.agent.status().cause.endswith("the engine ends")
        assert not head.of(LeaveCluster), "the head knows"


async def test_a_missing_model_ends_the_agent() -> None:
    head = FakeHead()
    agent = RunningAgent(head)
    agent.find_error = ValueError("the hash of ./model differs")
    assert await agent.ended() == 2
    [left] = await until(lambda: head.of(LeaveCluster))
    assert left.is_failure
    assert "the hash of ./model differs" in left.cause
    await head.close()


async def test_messages_before_hello_of_the_head_end_the_session() -> None:
    head = FakeHead()
    head.answer = lambda join: EndWorker(1) if len(head.joins) == 1 else head.welcome
    agent = RunningAgent(head)
    await until(lambda: agent.state == "member")
    assert len(head.joins) == 2
    agent.agent.leave("the test ends")
    assert await agent.ended() == 0
    assert not agent.node.killed
    await head.close()
