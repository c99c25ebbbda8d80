"""The end of a stage's threads, whatever they are doing, while the process lives on."""

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from gllm.messages.steps import GrammarReady, RegisterSequences
from gllm.runtime.worker.executor import DeviceTime
from gllm.runtime.worker.stage import CLOSED, StageRunner
from gllm.transport.base import EdgeLayout
from gllm.transport.edge import create_edge
from gllm.transport.shared_memory import SharedMemoryReceiver, SharedMemorySender
from tests.runtime.worker.test_stage import FakeExecutor, FakeReceiver, FakeSender, Results, plan

SHAPE = EdgeLayout(slots=3, max_tokens=8, hidden_size=3, itemsize=4)


class Executor(FakeExecutor):
    """Its steps wait until the test lets them go on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.computing, self.may_compute = threading.Event(), threading.Event()
        self.may_compute.set()
        self.compiling: Future[bytes] = Future()
        self.failed = ""

    def register(self, message: RegisterSequences) -> "Future[bytes]":
        return self.compiling

    def compute(self, batch: Any, hidden: torch.Tensor | None) -> torch.Tensor:
        self.computing.set()
        assert self.may_compute.wait(60)
        return super().compute(batch, hidden)

    def fail_sequences(self, error: str) -> None:
        """As a guide does, it wakes the thread that waits for it."""
        self.failed = error
        self.sampling.set()


class Reports(Results):
    def __init__(self) -> None:
        super().__init__()
        self.grammars: list[GrammarReady] = []
        self.threads: set[threading.Thread] = set()
        """Threads of the stage."""

    def add(self, message: Any) -> None:
        if isinstance(message, GrammarReady):
            self.grammars.append(message)
        else:
            self.queue.put_nowait(message)


def start(executor: Executor, **ends: Any) -> tuple[StageRunner, Reports]:
    reports = Reports()
    handlers = reports.add, reports.fail
    receivers, senders = (
        [end for end in [ends.get(name)] if end is not None] for name in ("receiver", "sender")
    )
    executor.has_sampler = not senders
    before = set(threading.enumerate())
    stage = StageRunner(executor, receivers, senders, *handlers)  # type: ignore[arg-type]
    reports.threads = set(threading.enumerate()) - before
    assert reports.threads
    return stage, reports


def check_ended(reports: Reports) -> None:
    assert not any(thread.is_alive() for thread in reports.threads)
    assert not reports.faults


class Device:
    """Options of an executor on a device: its steps end when `ready` is set."""

    def __init__(self) -> None:
        self.ready = threading.Event()

    def wait(self, batch: Any) -> DeviceTime:
        assert self.ready.wait(60)
        return DeviceTime(0.0, 0.0)


@pytest.mark.parametrize("receiver", [None, FakeReceiver()])
@pytest.mark.parametrize("is_device", [False, True])
async def test_an_idle_stage_ends(receiver: FakeReceiver | None, is_device: bool) -> None:
    executor = Executor(wait=Device().wait) if is_device else Executor()
    stage, reports = start(executor, receiver=receiver)
    await asyncio.to_thread(stage.close)
    check_ended(reports)


@pytest.mark.parametrize("receiver", [None, FakeReceiver()])
async def test_a_step_that_computes_ends_first_and_is_dropped(
    receiver: FakeReceiver | None,
) -> None:
    executor = Executor()
    executor.may_compute.clear()
    stage, reports = start(executor, receiver=receiver)
    for step in (4, 5, 6):
        stage.run_plan(plan(step))
    assert await asyncio.to_thread(executor.computing.wait, 60)
    closing = asyncio.ensure_future(asyncio.to_thread(stage.close))
    while not stage.is_closed:
        await asyncio.sleep(0.01)
    assert not closing.done()
    executor.may_compute.set()
    await closing
    check_ended(reports)
    await asyncio.sleep(0)
    assert reports.queue.empty()
    assert "compute 5" not in executor.log


async def test_a_stage_that_waits_for_activations_ends() -> None:
    """Also when its neighbour is gone."""
    edge = create_edge("test-edge")
    receiver = SharedMemoryReceiver(edge.descriptors, SHAPE, torch.float32)
    stage, reports = start(Executor(), receiver=receiver)
    for step in (4, 5):
        stage.run_plan(plan(step))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(stage.close)
    check_ended(reports)
    receiver.close()
    edge.close()


async def test_a_thread_that_waits_for_a_grammar_ends() -> None:
    executor = Executor()
    executor.sampling.clear()
    stage, reports = start(executor, receiver=FakeReceiver())
    for step in (4, 5):
        stage.run_plan(plan(step))
    while executor.log[-1:] != ["compute 5"]:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(stage.close)
    check_ended(reports)
    assert executor.failed == CLOSED
    assert reports.queue.empty()


@pytest.mark.parametrize("outcome", ["compiled", "failed", "cancelled"])
async def test_a_grammar_that_compiles_meanwhile_is_not_reported(outcome: str) -> None:
    executor = Executor()
    stage, reports = start(executor)
    stage.register(RegisterSequences(1, 3))
    await asyncio.to_thread(stage.close)
    if outcome == "compiled":
        executor.compiling.set_result(b"")
    elif outcome == "failed":
        executor.compiling.set_exception(ValueError("no grammar"))
    else:
        assert executor.compiling.cancel()
    await asyncio.sleep(0)
    check_ended(reports)
    assert not reports.grammars


async def test_a_result_on_its_way_to_the_loop_is_dropped() -> None:
    stage, reports = start(Executor())
    stage.run_plan(plan(4))
    while stage.is_busy:
        pass  # The loop does not run, so the result waits.
    stage.close()
    await asyncio.sleep(0.05)
    assert reports.queue.empty()


async def test_a_device_finishes_its_step_first() -> None:
    device, sender = Device(), FakeSender()
    executor = Executor(wait=device.wait)
    stage, reports = start(executor, receiver=FakeReceiver(), sender=sender)
    for step in (4, 5):
        stage.run_plan(plan(step))
    while len(sender.sent) < 2:
        await asyncio.sleep(0.01)
    closing = asyncio.ensure_future(asyncio.to_thread(stage.close))
    while not stage.is_closed:
        await asyncio.sleep(0.01)
    assert not closing.done()
    device.ready.set()
    await closing
    check_ended(reports)


async def test_nothing_is_left_of_many_stages() -> None:
    before = threading.active_count()
    for _ in range(20):
        edge = create_edge("test-edge")
        sender = SharedMemorySender(edge.descriptors, SHAPE, torch.float32)
        receiver = SharedMemoryReceiver(edge.descriptors, SHAPE, torch.float32)
        stage, reports = start(Executor(), receiver=receiver)
        sender.send(4, torch.zeros(1, 3))
        for step in (4, 5):
            stage.run_plan(plan(step))
        await reports.take(1)
        stage.close()
        check_ended(reports)
        for end in (receiver, sender):
            end.close()
        edge.close()
    assert threading.active_count() == before
