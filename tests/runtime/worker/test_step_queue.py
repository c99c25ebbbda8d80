"""A stage with two lanes: which step it computes next, and what wakes it."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gllm.runtime.worker.stage import (
    OneLaneQueue,
    PreparedStep,
    StageRunner,
    TwoLaneQueue,
    create_step_queue,
)
from gllm.scheduler.lanes import MAX_OVERTAKES
from gllm.scheduler.plan import ScheduledRow, StepPlan
from gllm.transport.base import EdgeLayout, StepFailedError
from gllm.transport.edge import Edge, create_edge
from gllm.transport.registry import open_edges
from gllm.transport.ring import Ring
from gllm.transport.shared_memory import SharedMemoryReceiver, SharedMemorySender
from tests.runtime.worker.test_stage import FakeSender, Results
from tests.runtime.worker.test_stage_close import Executor

SHAPE = EdgeLayout(slots=4, max_tokens=8, hidden_size=3, itemsize=4)


@pytest.fixture
def edge() -> Iterator[Edge]:
    created = create_edge("test-lanes", num_lanes=2)
    yield created
    created.close()


def open_ends(edge: Edge) -> tuple[list[SharedMemoryReceiver], list[SharedMemorySender]]:
    receivers: Any = open_edges(edge, [], "shared-memory", SHAPE, torch.float32)[0]
    _, (senders,) = open_edges(None, [edge], "shared-memory", SHAPE, torch.float32)
    return receivers, senders  # type: ignore[return-value]


def plan_of(step: int, lane: int, turn: int) -> StepPlan:
    rows = [ScheduledRow(step, 0, 0, 1, [0], [], True)]
    plan = StepPlan(step, rows, [], lane, step - turn)
    assert plan.turn == turn
    return plan


def prepared(step: int, lane: int, turn: int) -> PreparedStep:
    batch: Any = SimpleNamespace(step=step)
    return PreparedStep(plan_of(step, lane, turn), batch)


class Getter:
    """Steps that a thread gets from a queue, and then receives, as a stage does."""

    def __init__(self, queue: TwoLaneQueue, receivers: Sequence[SharedMemoryReceiver] = ()) -> None:
        self.steps: list[int] = []
        self._queue, self._receivers = queue, receivers
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while (step := self._queue.get()) is not None:
            if self._receivers:
                with suppress(StepFailedError):
                    self._receivers[step.plan.lane].receive(step.plan.turn, 1)
            with self._changed:
                self.steps.append(step.plan.step)
                self._changed.notify()

    def expect(self, *steps: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.steps) >= len(steps), 60)
        assert self.steps == list(steps)

    def stop(self) -> None:
        self._queue.close()
        self._thread.join(60)
        self._queue.free()


def test_stages_with_one_lane_keep_the_order_of_plans() -> None:
    assert isinstance(create_step_queue(1, []), OneLaneQueue)
    assert isinstance(create_step_queue(2, []), TwoLaneQueue)


def test_a_first_stage_computes_decodes_first() -> None:
    queue = TwoLaneQueue([])
    for step, (lane, turn) in enumerate([(1, 0), (1, 1), (0, 0), (1, 2), (0, 1)]):
        queue.put(prepared(step, lane, turn))
    getter = Getter(queue)
    getter.expect(2, 4, 0, 1, 3)
    queue.put(prepared(5, 1, 3))
    getter.expect(2, 4, 0, 1, 3, 5)
    getter.stop()


def test_prefill_waits_for_a_bounded_number_of_decodes() -> None:
    queue = TwoLaneQueue([])
    queue.put(prepared(0, 1, 0))
    for turn in range(MAX_OVERTAKES + 2):
        queue.put(prepared(turn + 1, 0, turn))
    got = []
    for _ in range(MAX_OVERTAKES + 3):
        step = queue.get()
        assert step is not None
        got.append(step.plan.step)
    before = list(range(1, MAX_OVERTAKES + 1))
    assert got == [*before, 0, MAX_OVERTAKES + 1, MAX_OVERTAKES + 2]
    queue.free()


def test_a_step_needs_its_plan_and_its_activations(edge: Edge) -> None:
    receivers, (decode, prefill) = open_ends(edge)
    queue = TwoLaneQueue(receivers)
    getter = Getter(queue, receivers)
    hidden = torch.zeros(1, 3)
    # Activations without a plan, then the plan.
    decode.send(0, hidden)
    queue.put(prepared(0, 1, 0))
    queue.put(prepared(1, 0, 0))
    getter.expect(1)
    # The plan of a decode whose activations do not come: prefill goes on.
    queue.put(prepared(2, 0, 1))
    queue.put(prepared(3, 1, 1))
    prefill.send(0, hidden)
    getter.expect(1, 0)
    prefill.fail(1, "no memory")
    getter.expect(1, 0, 3)
    decode.send(1, hidden)
    getter.expect(1, 0, 3, 2)
    getter.stop()


def test_events_without_a_step_do_not_keep_a_core_busy(edge: Edge) -> None:
    """As a data mover writes them that was restarted."""
    receivers, (decode, _) = open_ends(edge)
    queue = TwoLaneQueue(receivers)
    mover = Ring(edge.descriptors[0], edge.descriptors[1], SHAPE)
    mover.begin_relay()
    decode.send(0, torch.zeros(1, 3))
    mover.begin_relay()
    getter = Getter(queue, receivers)
    queue.put(prepared(0, 0, 0))
    getter.expect(0)
    queue.put(prepared(1, 0, 1))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.1
    decode.send(1, torch.zeros(1, 3))
    getter.expect(0, 1)
    getter.stop()


@pytest.mark.parametrize("steps", [[], [(0, 0, 0)], [(0, 1, 0), (1, 0, 0)]])
def test_a_queue_that_waits_ends(edge: Edge, steps: list[tuple[int, int, int]]) -> None:
    receivers, _ = open_ends(edge)
    queue = TwoLaneQueue(receivers)
    for step in steps:
        queue.put(prepared(*step))
    getter = Getter(queue, receivers)
    getter.stop()
    assert getter.steps == []


async def test_a_stage_sends_each_lane_by_its_turns() -> None:
    """Decodes overtake the prefill that waits; a step that fails does so in its lane."""
    executor, results = Executor(), Results()
    executor.may_compute.clear()
    executor.has_sampler = False
    senders: list[Any] = [FakeSender(), FakeSender()]
    handlers: Any = results.queue.put_nowait, results.fail
    stage = StageRunner(executor, [], senders, *handlers)  # type: ignore[arg-type]
    stage.run_plan(plan_of(4, 1, 0))
    assert await asyncio.to_thread(executor.computing.wait, 60)
    for step, lane, turn in [(5, 1, 1), (6, 0, 0), (1, 1, 2), (7, 0, 1)]:
        stage.run_plan(plan_of(step, lane, turn))
    executor.may_compute.set()
    await results.until(lambda: not stage.is_busy)
    assert executor.log == ["compute 4", "compute 6", "compute 7", "compute 5"]
    assert senders[0].sent == [(0, ""), (1, "")]
    assert senders[1].sent == [(0, ""), (1, ""), (2, "KeyError: 'prepare'")]
    times, _ = stage.pop_step_times()
    assert [time.step for time in times] == [4, 6, 7, 5]
    await asyncio.to_thread(stage.close)
    assert not results.faults


async def test_a_last_stage_computes_what_has_arrived(edge: Edge) -> None:
    receivers, (decode, prefill) = open_ends(edge)
    executor, results = Executor(), Results()
    handlers: Any = results.queue.put_nowait, results.fail
    stage = StageRunner(executor, receivers, [], *handlers)  # type: ignore[arg-type]
    for step, lane, turn in [(4, 1, 0), (5, 0, 0), (6, 1, 1), (7, 0, 1)]:
        stage.run_plan(plan_of(step, lane, turn))
    decode.send(0, torch.zeros(1, 3))
    assert [each.step for each in await results.take(1)] == [5]
    prefill.send(0, torch.zeros(1, 3))
    prefill.fail(1, "no memory")
    got = await results.take(2)
    assert [(each.step, each.error) for each in got] == [(4, ""), (6, "no memory")]
    decode.send(1, torch.zeros(1, 3))
    assert [each.step for each in await results.take(1)] == [7]
    await asyncio.to_thread(stage.close)
    assert not results.faults
