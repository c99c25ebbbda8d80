"""A stage's threads: order, failures that stay within their step, waiting for sampled tokens."""

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gllm.messages.sampling import SampleDetails
from gllm.messages.steps import StepDone
from gllm.runtime.worker.executor import DeviceTime
from gllm.runtime.worker.stage import StageRunner
from gllm.scheduler.plan import SampledToken, ScheduledRow, StepPlan, StepResult
from gllm.transport.base import StepFailedError, TransportError


def plan(step: int, tokens: int = 1) -> StepPlan:
    return StepPlan(step, [ScheduledRow(step, 0, 0, tokens, [0], [], True)], [])


class FakeExecutor:
    """Fails in the place that a step's number asks for; records what runs when."""

    measures_time = True

    def __init__(
        self,
        wait: Callable[[Any], DeviceTime] | None = None,
        bind_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """`wait`: of a device that computes asynchronously."""
        self.is_asynchronous = wait is not None
        self.has_sampler = True
        self.wait, self.bind_thread = wait, bind_thread
        self.log: list[str] = []
        self.given_up: list[tuple[str, int, str]] = []
        """Behind which line of the log, the step, why."""
        self.plans_given_up: list[tuple[int, str]] = []
        self.checked: list[int] = []
        """Steps whose blocks have checksums."""
        self.sampling = threading.Event()
        self.sampling.set()

    def prepare(self, step: StepPlan) -> Any:
        if step.step == 1:
            raise KeyError("prepare")
        return SimpleNamespace(step=step.step)

    def compute(self, batch: Any, hidden: torch.Tensor | None) -> torch.Tensor:
        self.log.append(f"compute {batch.step}")
        if batch.step == 2:
            raise RuntimeError("compute")
        return torch.zeros(1, 3)

    def span(self, batch: Any, begin: float, end: float) -> tuple[float, float]:
        return begin, end

    def cancel(self) -> None:
        """A step that computes ends first."""

    def sample(
        self, batch: Any, logits: torch.Tensor
    ) -> tuple[list[SampledToken], list[SampleDetails]]:
        assert self.sampling.wait(60)
        self.log.append(f"sample {batch.step}")
        if batch.step == 3:
            raise ValueError("sample")
        return [SampledToken(batch.step, 0, 9)], []

    def fail_batch(self, batch: Any, error: str) -> None:
        self.given_up.append((self.log[-1], batch.step, error))

    def store_checksums(self, batch: Any) -> None:
        self.checked.append(batch.step)

    def fail_plan(self, plan: StepPlan, error: str) -> None:
        self.plans_given_up.append((plan.step, error))


class Results:
    """Results of a stage; an error that ends the stage ends each wait for one."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[StepDone | BaseException] = asyncio.Queue()
        self.faults: list[BaseException] = []

    def fail(self, error: BaseException) -> None:
        """Note the error that ends the stage."""
        self.faults.append(error)
        self.queue.put_nowait(error)

    async def take(self, count: int) -> list[StepResult]:
        """Wait for the results of steps."""
        return [(await self._get()).result for _ in range(count)]

    async def fault(self) -> BaseException:
        """Wait for the error that ends the stage, before any further result."""
        result = await asyncio.wait_for(self.queue.get(), 60)
        assert isinstance(result, BaseException), result
        return result

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds before a step has a result."""
        async with asyncio.timeout(60):
            while not condition():
                assert self.queue.empty(), await self._get()
                await asyncio.sleep(0.001)

    async def _get(self) -> StepDone:
        result = await asyncio.wait_for(self.queue.get(), 60)
        if isinstance(result, BaseException):
            raise result
        return result


def make_stage(
    executor: FakeExecutor, min_step_seconds: float = 0.0, **ends: Any
) -> tuple[StageRunner, Results]:
    results = Results()
    receivers = [ends["receiver"]] if "receiver" in ends else []
    senders = [ends["sender"]] if "sender" in ends else []
    executor.has_sampler = not senders
    handlers = results.queue.put_nowait, results.fail, min_step_seconds
    stage = StageRunner(executor, receivers, senders, *handlers)  # type: ignore[arg-type]
    return stage, results


async def test_a_failing_step_fails_alone_and_results_keep_their_order() -> None:
    executor = FakeExecutor()
    stage, results = make_stage(executor)
    for step in range(6):
        stage.run_plan(plan(step))
    got = await results.take(6)
    assert [result.step for result in got] == list(range(6))
    errors = {result.step: result.error for result in got if result.error}
    assert errors == {
        1: "KeyError: 'prepare'",
        2: "RuntimeError: compute",
        3: "ValueError: sample",
    }
    assert executor.plans_given_up == [(1, "KeyError: 'prepare'")]
    # Before the next step, which may wait for the tokens.
    assert executor.given_up == [
        ("compute 2", 2, "RuntimeError: compute"),
        ("sample 3", 3, "ValueError: sample"),
    ]
    assert stage.num_steps == 4
    assert stage.busy_seconds > 0
    await results.until(lambda: executor.checked == [0, 3, 4, 5])


async def test_a_plan_that_cannot_be_prepared_is_given_up_before_the_steps_ahead_are_done() -> None:
    """One of those may wait for a token of it."""
    executor = FakeExecutor()
    executor.sampling.clear()
    stage, results = make_stage(executor)
    stage.run_plan(plan(4))
    stage.run_plan(plan(1))
    assert executor.plans_given_up == [(1, "KeyError: 'prepare'")]
    executor.sampling.set()
    assert [result.step for result in await results.take(2)] == [4, 1]


@pytest.mark.parametrize("wait", [None, lambda batch: DeviceTime(0.001, 0.001)])
async def test_a_step_takes_its_minimum_time(wait: Callable[[Any], DeviceTime] | None) -> None:
    stage, results = make_stage(FakeExecutor(wait), min_step_seconds=0.02)
    for step in range(4, 8):
        stage.run_plan(plan(step))
    await results.take(4)
    times, _ = stage.pop_step_times()
    assert [time.step for time in times] == [4, 5, 6, 7]
    assert min(time.end - time.start for time in times) >= 0.02
    assert times[-1].end - times[0].start >= 0.06


class FakeReceiver:
    def receive(self, step: int, tokens: int) -> torch.Tensor:
        if step == 7:
            raise StepFailedError("an earlier stage failed")
        return torch.zeros(tokens, 3)

    def cancel(self) -> None:
        """Nothing waits."""


async def test_a_step_that_failed_on_an_earlier_stage_is_given_up_here_too() -> None:
    executor = FakeExecutor()
    stage, results = make_stage(executor, receiver=FakeReceiver())
    for step in (4, 7, 1):
        stage.run_plan(plan(step))
    errors = [result.error for result in await results.take(3)]
    assert errors == ["", "an earlier stage failed", "KeyError: 'prepare'"]
    assert [given[1:] for given in executor.given_up] == [(7, "an earlier stage failed")]


async def test_behind_a_pipeline_sampling_runs_beside_the_next_step() -> None:
    executor = FakeExecutor()
    executor.sampling.clear()
    stage, results = make_stage(executor, receiver=FakeReceiver())
    stage.run_plan(plan(4))
    stage.run_plan(plan(2))
    stage.run_plan(plan(5))
    await results.until(lambda: executor.log == ["compute 4", "compute 2", "compute 5"])
    executor.sampling.set()
    assert [result.step for result in await results.take(3)] == [4, 2, 5]


async def test_a_single_stage_computes_no_further_before_it_has_sampled() -> None:
    executor = FakeExecutor()
    executor.sampling.clear()
    stage, results = make_stage(executor)
    stage.run_plan(plan(4))
    stage.run_plan(plan(5))
    await asyncio.sleep(0.1)
    assert executor.log == ["compute 4"]
    assert stage.is_busy
    executor.sampling.set()
    await results.take(2)
    assert executor.log == ["compute 4", "sample 4", "compute 5", "sample 5"]


async def test_times_are_told_up_to_the_step_that_is_being_computed() -> None:
    executor = FakeExecutor()
    stage, results = make_stage(executor)
    stage.run_plan(plan(4))
    await results.take(1)
    (time,), until = stage.pop_step_times()
    assert time.step == 4
    assert time.start <= time.end <= until
    assert stage.pop_step_times()[0] == []


class FakeSender:
    def __init__(self) -> None:
        self.sent: list[tuple[int, str]] = []

    def mark_begin(self, step: int) -> None:
        """Nobody asks."""

    def send(self, step: int, hidden: torch.Tensor) -> None:
        self._add(step, "")

    def fail(self, step: int, error: str) -> None:
        self._add(step, error)

    def _add(self, step: int, error: str) -> None:
        self.sent.append((step, error))


async def test_a_stage_in_the_middle_hands_failures_on() -> None:
    sender = FakeSender()
    stage, results = make_stage(FakeExecutor(), sender=sender)
    for step in (0, 1, 2, 4):
        stage.run_plan(plan(step))
    await results.until(lambda: len(sender.sent) == 4)
    expected = [(0, ""), (1, "KeyError: 'prepare'"), (2, "RuntimeError: compute"), (4, "")]
    assert sender.sent == expected


class BrokenReceiver:
    def receive(self, step: int, tokens: int) -> torch.Tensor:
        raise OSError("the edge is gone")


async def test_a_broken_edge_is_a_fault() -> None:
    stage, results = make_stage(FakeExecutor(), receiver=BrokenReceiver())
    stage.run_plan(plan(0))
    assert str(await results.fault()) == "the edge is gone"


async def test_a_device_gets_its_next_step_before_the_tokens_are_there() -> None:
    """A step's time is the device's, and its computing has ended when the device says so."""
    executor = FakeExecutor(lambda batch: DeviceTime(batch.step / 8, batch.step / 16))
    executor.sampling.clear()
    stage, results = make_stage(executor)
    for step in (4, 2, 5):
        stage.run_plan(plan(step))
    await results.until(lambda: executor.log == ["compute 4", "compute 2", "compute 5"])
    assert stage.is_busy
    executor.sampling.set()
    got = await results.take(3)
    assert [result.step for result in got] == [4, 2, 5]
    assert [bool(result.error) for result in got] == [False, True, False]
    times, _ = stage.pop_step_times()
    assert [(time.step, round(time.end - time.start, 6)) for time in times] == [
        (4, 0.5),
        (5, 0.625),
    ]
    assert stage.busy_seconds == pytest.approx(9 / 16)
    assert not stage.is_busy


async def test_threads_of_a_stage_use_its_device() -> None:
    bound: set[str] = set()

    class Executor(FakeExecutor):
        def compute(self, batch: Any, hidden: torch.Tensor | None) -> torch.Tensor:
            assert threading.current_thread().name in bound
            return super().compute(batch, hidden)

        def sample(self, batch: Any, logits: torch.Tensor) -> Any:
            assert threading.current_thread().name in bound
            return super().sample(batch, logits)

    executor = Executor(
        lambda batch: DeviceTime(0.0, 0.0),
        lambda: bound.add(threading.current_thread().name),
    )
    stage, results = make_stage(executor)
    stage.run_plan(plan(4))
    assert [result.error for result in await results.take(1)] == [""]
    assert bound == {"_compute_steps", "_sample_steps"}


async def test_a_stage_in_the_middle_waits_for_its_device_too() -> None:
    sender = FakeSender()
    executor = FakeExecutor(lambda batch: DeviceTime(0.25, 0.25))
    stage, results = make_stage(executor, sender=sender)
    for step in (0, 1, 2, 4):
        stage.run_plan(plan(step))
    await results.until(lambda: len(sender.sent) == 4)
    await results.until(lambda: not stage.is_busy)
    assert [time.step for time in stage.pop_step_times()[0]] == [0, 4]


class AbortedReceiver(FakeReceiver):
    def check(self) -> None:
        raise TransportError("the transfer was aborted")


async def test_what_was_computed_with_nothing_is_not_delivered() -> None:
    receiver = AbortedReceiver()
    executor = FakeExecutor(lambda batch: DeviceTime(0.0, 0.0))
    stage, results = make_stage(executor, receiver=receiver)
    stage.run_plan(plan(4))
    assert str(await results.fault()) == "the transfer was aborted"
    assert results.queue.empty()
