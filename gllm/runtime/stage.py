"""One stage's threads: inputs are built on the event loop, computing and sampling have their own.

Owns the order of a stage's work and the hand-over between its threads. Knows nothing of processes
and of where plans come from.

A step's inputs are built while the steps before still compute; its activations are awaited, without
using the CPU, only by the compute thread. Sampling runs beside the next step's computing.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from gllm.messages import Register, Result, RowLogprobs
from gllm.runtime.batch import Batch
from gllm.runtime.executor import StageExecutor
from gllm.scheduler.plan import StepPlan, StepResult, StepTime
from gllm.transport.base import Receiver, Sender, StepFailed

log = logging.getLogger(__name__)


class Stage:
    """Runs plans in order. `deliver` hears results on the event loop, `fault` why all has ended."""

    def __init__(
        self,
        executor: StageExecutor,
        receiver: Receiver | None,
        sender: Sender | None,
        deliver: Callable[[Result], None],
        fault: Callable[[BaseException], None],
    ) -> None:
        self.steps = 0
        self.busy_seconds = 0.0
        self._times: deque[StepTime] = deque()
        self._begun: float | None = None
        """Since when a step is being computed."""
        self._accepted = 0
        self._ended = 0
        self._executor = executor
        self._receiver = receiver
        self._sender = sender
        self._deliver = deliver
        self._fault = fault
        self._loop = asyncio.get_running_loop()
        self._planned: queue.SimpleQueue[tuple[StepPlan, Batch | str]] = queue.SimpleQueue()
        self._computed: queue.SimpleQueue[tuple[StepPlan, Batch, torch.Tensor]] = (
            queue.SimpleQueue()
        )
        self._unsampled = 0
        """Steps handed to the sampler and not finished by it."""
        self._sampled = threading.Condition()
        for work in (self._compute_steps, self._sample_steps):
            threading.Thread(
                target=self._guard, args=(work,), name=work.__name__, daemon=True
            ).start()

    def register(self, message: Register) -> None:
        """Sequences that coming plans may name."""
        self._executor.register(message)

    @property
    def is_busy(self) -> bool:
        """Some step has not been computed yet."""
        return self._ended < self._accepted

    def plan(self, plan: StepPlan) -> None:
        """Build a step's inputs now; it computes when its turn comes."""
        self._accepted += 1
        batch: Batch | str
        try:
            batch = self._executor.prepare(plan)
        except Exception as error:
            log.exception("step %d could not be prepared", plan.step)
            batch = describe(error)
        self._planned.put((plan, batch))

    def take_times(self) -> tuple[list[StepTime], float]:
        """When the steps since the last call were computed, and until when they are all that this
        stage began."""
        # In this order, for steps end meanwhile.
        now, begun = time.monotonic(), self._begun
        times = [self._times.popleft() for _ in range(len(self._times))]
        return times, now if begun is None else begun

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._fault, error)

    def _compute_steps(self) -> None:
        while True:
            plan, batch = self._planned.get()
            try:
                self._compute(plan, batch)
            except StepFailed as error:
                self._fail(plan, str(error))
            self._begun = None
            self._ended += 1

    def _compute(self, plan: StepPlan, batch: Batch | str) -> None:
        """One step. Raises StepFailed where it brought nothing, here or on a stage before."""
        hidden = None
        if self._receiver is not None:
            tokens = sum(row.num_tokens for row in plan.rows)
            hidden = self._receiver.receive(plan.step, tokens)
        if isinstance(batch, str):
            raise StepFailed(batch)
        if batch.has_placeholders:
            with self._sampled:
                self._sampled.wait_for(lambda: self._unsampled == 0)
        begin = self._begun = time.monotonic()
        try:
            output = self._executor.compute(batch, hidden)
        except Exception as error:
            log.exception("step %d failed", plan.step)
            raise StepFailed(describe(error)) from error
        if self._sender is not None:
            self._sender.send(plan.step, output)
        else:
            with self._sampled:
                self._unsampled += 1
            self._computed.put((plan, batch, output))
        end = time.monotonic()
        self.steps += 1
        self.busy_seconds += end - begin
        self._times.append(StepTime(plan.step, begin, end))

    def _fail(self, plan: StepPlan, error: str) -> None:
        """The step's sequences end; those of other steps go on."""
        if self._sender is not None:
            self._sender.fail(plan.step, error)
        else:
            # Results go out in step order, so it waits for the steps that are being sampled.
            with self._sampled:
                self._sampled.wait_for(lambda: self._unsampled == 0)
            self._hand_over(StepResult(plan.step, [], error), [])

    def _sample_steps(self) -> None:
        while True:
            plan, batch, logits = self._computed.get()
            logprobs: list[RowLogprobs] = []
            try:
                sampled, logprobs = self._executor.sample(batch, logits)
                result = StepResult(plan.step, sampled)
            except Exception as error:
                log.exception("step %d could not be sampled", plan.step)
                result = StepResult(plan.step, [], describe(error))
            self._hand_over(result, logprobs)
            with self._sampled:
                self._unsampled -= 1
                self._sampled.notify()

    def _hand_over(self, result: StepResult, logprobs: list[RowLogprobs]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, Result(result, logprobs))


def describe(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
