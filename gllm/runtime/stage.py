"""One stage's threads: inputs are built on the event loop, computing and sampling have their own.

Owns the order of a stage's work and the hand-over between its threads. Knows nothing of processes
and of where plans come from.

A step's inputs are built while the steps before still compute; its activations are awaited, without
using the CPU, only by the compute thread. Behind a pipeline sampling runs beside the next step's
computing. A single stage computes no further without its tokens, so its compute thread samples: a
change of threads takes longer than most sampling. Where a device computes, one thread gives it work
and another waits for it.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

import torch

from gllm.messages.sampling import SampleDetails
from gllm.messages.steps import GrammarReady, RegisterSequences, StepDone
from gllm.runtime.batch import Batch
from gllm.runtime.executor import DeviceTime, StageExecutor
from gllm.scheduler.plan import StepPlan, StepResult, StepTime
from gllm.transport.base import Receiver, Sender, StepFailed

log = logging.getLogger(__name__)


class Computed(NamedTuple):
    """A step of the last stage before it is sampled, or of any stage on a device."""

    plan: StepPlan
    batch: Batch
    logits: torch.Tensor


class Stage:
    """Runs plans in order. `deliver` hears results on the event loop, `fault` why all has ended."""

    def __init__(
        self,
        executor: StageExecutor,
        receiver: Receiver | None,
        sender: Sender | None,
        deliver: Callable[[StepDone | GrammarReady], None],
        fault: Callable[[BaseException], None],
        finish: Callable[[Batch], DeviceTime] | None = None,
        bind_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """`finish`: waits for a device that `executor.compute` only gives work to, and returns
        the time that it took for a step; None where computing is over when `compute` returns.
        `bind_thread`: called first on each thread of the stage."""
        self._bind_thread = bind_thread
        self.steps = 0
        self.busy_seconds = 0.0
        self._times: deque[StepTime] = deque()
        self._under_way: deque[float] = deque()
        """Since when steps are being computed."""
        self._accepted = 0
        self._failed = 0
        self._executor = executor
        self._receiver = receiver
        self._sender = sender
        self._deliver = deliver
        self._fault = fault
        self._loop = asyncio.get_running_loop()
        self._planned: queue.SimpleQueue[tuple[StepPlan, Batch | str]] = queue.SimpleQueue()
        self._computed: queue.SimpleQueue[Computed | StepResult] = queue.SimpleQueue()
        """For the sampler's thread, where there is one."""
        self._device_finish = finish
        self._samples_apart = finish is not None or (sender is None and receiver is not None)
        for work in [self._compute_steps] + [self._sample_steps] * self._samples_apart:
            threading.Thread(
                target=self._guard, args=(work,), name=work.__name__, daemon=True
            ).start()

    def register(self, message: RegisterSequences) -> None:
        """Register sequences that coming plans may name; report when those with a grammar can
        begin, and which cannot be sampled."""
        begun = self._executor.register(message)
        if begun is not None:
            begun.add_done_callback(lambda done: self._on_begun(message, done))

    def _on_begun(self, message: RegisterSequences, done: "Future[bytes]") -> None:
        error = done.exception()
        reason = "" if error is None else str(error) or describe(error)
        told = GrammarReady(message.seq, reason, message.n)
        self._loop.call_soon_threadsafe(self._deliver, told)

    @property
    def is_busy(self) -> bool:
        """Some step has not been computed yet."""
        return self.steps + self._failed < self._accepted

    def plan(self, plan: StepPlan) -> None:
        """Build a step's inputs now; it computes when its turn comes."""
        self._accepted += 1
        batch: Batch | str
        try:
            batch = self._executor.prepare(plan)
        except Exception as error:
            log.exception("step %d could not be prepared", plan.step)
            batch = describe(error)
            # Before it is queued: a step ahead of it in the queue may wait for one of its guides.
            self._executor.give_up_plan(plan, batch)
        self._planned.put((plan, batch))

    def take_times(self) -> tuple[list[StepTime], float]:
        """When the steps since the last call were computed, and until when they are all that this
        stage began."""
        # In this order, for steps end meanwhile.
        until = time.monotonic()
        with suppress(IndexError):
            until = self._under_way[0]
        times = [self._times.popleft() for _ in range(len(self._times))]
        return times, until

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            self._bind_thread()
            work()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._fault, error)

    def _compute_steps(self) -> None:
        while True:
            plan, batch = self._planned.get()
            try:
                self._compute(plan, batch)
            except StepFailed as error:
                if not isinstance(batch, str):
                    self._executor.give_up(batch, str(error))
                self._fail(plan, str(error))

    def _compute(self, plan: StepPlan, batch: Batch | str) -> None:
        """One step. Raises StepFailed where it brought nothing, here or on a stage before."""
        hidden = None
        if self._receiver is not None:
            tokens = sum(row.num_tokens for row in plan.rows)
            hidden = self._receiver.receive(plan.step, tokens)
        if isinstance(batch, str):
            raise StepFailed(batch)
        begin = time.monotonic()
        self._under_way.append(begin)
        try:
            with torch.profiler.record_function(f"step {plan.step}"):
                output = self._executor.compute(batch, hidden)
        except Exception as error:
            log.exception("step %d failed", plan.step)
            self._under_way.pop()
            raise StepFailed(describe(error)) from error
        if self._sender is not None:
            self._sender.send(plan.step, output)
        if self._device_finish is None:
            end = time.monotonic()
            self._note(plan.step, begin, end, end - begin)
        if self._sender is None or self._device_finish is not None:
            self._bring(Computed(plan, batch, output))

    def _note(self, step: int, begin: float, end: float, busy_seconds: float) -> None:
        """Count the oldest step under way as computed."""
        self.steps += 1
        self.busy_seconds += busy_seconds
        self._times.append(StepTime(step, begin, end))
        self._under_way.popleft()

    def _fail(self, plan: StepPlan, error: str) -> None:
        """The step's sequences end; those of other steps go on."""
        self._failed += 1
        if self._sender is not None:
            self._sender.fail(plan.step, error)
        else:
            self._bring(StepResult(plan.step, [], error))

    def _bring(self, item: Computed | StepResult) -> None:
        """The last stage's results go out in the order of steps, whoever samples."""
        if self._samples_apart:
            self._computed.put(item)
        else:
            self._finish(item)

    def _sample_steps(self) -> None:
        while True:
            self._finish(self._computed.get())

    def _finish(self, item: Computed | StepResult) -> None:
        """Sample where that is left to do, and deliver."""
        logprobs: list[SampleDetails] = []
        if isinstance(item, Computed) and self._device_finish is not None:
            self._wait_for_device(item, self._device_finish)
            if self._sender is not None:
                return
        if isinstance(item, Computed):
            step, batch = item.plan.step, item.batch
            try:
                sampled, logprobs = self._executor.sample(batch, item.logits)
                item = StepResult(step, sampled)
            except Exception as error:
                log.exception("step %d could not be sampled", step)
                self._executor.give_up(batch, describe(error))
                item = StepResult(step, [], describe(error))
        self._loop.call_soon_threadsafe(self._deliver, StepDone(item, logprobs))

    def _wait_for_device(self, item: Computed, finish: Callable[[Batch], DeviceTime]) -> None:
        """Until the step has been computed. Raises TransportFault where that was by activations
        that did not come."""
        spent = finish(item.batch)
        if self._receiver is not None:
            self._receiver.check()
        end = time.monotonic()
        self._note(item.plan.step, end - spent.elapsed, end, spent.busy)


def describe(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
