"""Threads of one stage: inputs are built on the event loop; computing and sampling have threads.

The inputs of a step are built while earlier steps still compute. Only the compute thread waits for
activations, without using the CPU. On the last of several stages a second thread samples while the
next step computes. A single stage cannot compute the next step without its tokens, so its compute
thread samples as well: a thread switch takes longer than most sampling. For a device, one thread
queues the work and the other one waits for it.

With two lanes (gllm/scheduler/lanes.py) a decode step overtakes prefill steps that wait. A stage of
several ranks has one lane, because its ranks compute the same steps at the same time.

The ranks of a stage run the same plans. Before each step they agree on its number and on whether it
has failed; what fails later ends the epoch, because the others wait in the middle of the step.
"""

import asyncio
import logging
import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

import torch

from gllm.kernels.all_reduce import GroupClosedError
from gllm.messages.sampling import SampleDetails
from gllm.messages.steps import GrammarReady, RegisterSequences, StepDone
from gllm.runtime.worker.batch import Batch
from gllm.runtime.worker.device import read_wait_counters
from gllm.runtime.worker.executor import Executor
from gllm.runtime.worker.slow_steps import SlowSteps
from gllm.scheduler.lanes import LaneOrder
from gllm.scheduler.plan import StepPlan, StepResult, StepTime
from gllm.transport.base import EdgeClosedError, Receiver, Sender, StepFailedError
from gllm.transport.groups import StageGroups

log = logging.getLogger(__name__)

CLOSED = "the stage was closed"
"""Error of sequences whose threads wait for something when the stage is closed."""


class ComputedStep(NamedTuple):
    """Step whose layers are computed or running on the GPU, and whose tokens are not read yet."""

    plan: StepPlan
    batch: Batch
    output: torch.Tensor
    """Logits on the last stage, activations on others."""


class PreparedStep(NamedTuple):
    """Step whose input tensors are built, or the error of building them."""

    plan: StepPlan
    batch: Batch | str
    """The inputs, or the error of a plan that could not be prepared."""


class OneLaneQueue(queue.SimpleQueue[PreparedStep | None]):
    """First-in-first-out queue of a stage's prepared steps, where no step may overtake another.

    A lane is a sequence of steps whose order is fixed; here it has decode and prefill steps.
    """

    def close(self) -> None:
        """End a waiting `get` and all later calls, which return None."""
        self.put(None)

    def free(self) -> None:
        """Free nothing: this queue has no descriptors."""


class TwoLaneQueue:
    """Queue of a stage's prepared steps in which decode steps may overtake prefill steps.

    Decode steps are one lane, prefill steps the other; order is fixed within a lane. A step leaves
    the queue when its activations have arrived.
    """

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        """Create an empty queue.

        receivers: receivers of the lanes; none on the first stage, where steps need no activations.
        """
        self._receivers = receivers
        self._order = LaneOrder()
        self._steps: tuple[deque[PreparedStep], deque[PreparedStep]] = deque(), deque()
        """By lane; the compute thread removes steps."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        """Written for each new step, and by `close`."""
        self._is_closed = False

    def put(self, step: PreparedStep) -> None:
        """Add a step, in the order of plans; called on the event loop."""
        self._steps[step.plan.lane].append(step)
        os.eventfd_write(self._wake, 1)

    def get(self) -> PreparedStep | None:
        """Wait for the next step without CPU load; None after `close`."""
        while not self._is_closed:
            lane = self._order.choose(self._is_ready(0), self._is_ready(1))
            if lane is not None:
                return self._steps[lane].popleft()
            self._wait()
        return None

    def close(self) -> None:
        """End a waiting `get` and all later calls, which return None."""
        self._is_closed = True
        os.eventfd_write(self._wake, 1)

    def free(self) -> None:
        """Close the event's descriptor; no other method runs at the same time or later."""
        os.close(self._wake)

    def _is_ready(self, lane: int) -> bool:
        """Return True if the oldest step of a lane can be computed."""
        steps = self._steps[lane]
        if not steps or not self._receivers:
            return bool(steps)
        return self._receivers[lane].has_arrived(steps[0].plan.turn)

    def _wait(self) -> None:
        """Wait for a new step, or for activations of the oldest steps."""
        # Only of lanes with a step: an event that is not read would end every wait.
        waiting = {
            receiver.event: lane
            for lane, receiver in enumerate(self._receivers)
            if self._steps[lane]
        }
        sources = select.poll()
        for source in (self._wake, *waiting):
            sources.register(source, select.POLLIN)
        for source, _ in sources.poll():
            if source == self._wake:
                os.eventfd_read(self._wake)
            elif not self._is_ready(waiting[source]):
                # A data mover that was restarted writes events without a step.
                os.eventfd_read(source)


class StageRunner:
    """Computes and samples the steps of one rank of a stage on threads; reports the results."""

    def __init__(
        self,
        executor: Executor,
        receivers: Sequence[Receiver],
        senders: Sequence[Sender],
        on_result: Callable[[StepDone | GrammarReady], None],
        on_error: Callable[[BaseException], None],
        min_step_seconds: float = 0.0,
        slowdown: float = 1.0,
        groups: StageGroups | None = None,
    ) -> None:
        """Start the threads.

        Args:
            executor: executor with its KV cache allocated.
            receivers: receivers from the previous stage, one per lane; empty on the first stage.
            senders: senders to the next stage, one per lane; empty on the last stage.
            on_result: called on the event loop with the messages for the driver.
            on_error: called on the event loop with the error that ends the stage; with
                GroupClosedError if another rank has ended it.
            min_step_seconds: sleep until a step has taken this long.
            slowdown: sleep until a step has taken this many times as long as it did.
            groups: groups of all ranks of the stage; None where it has one rank.
        """
        self.num_steps = 0
        """Steps computed."""
        self.busy_seconds = 0.0
        self._step_times: deque[StepTime] = deque()
        self._begun: deque[tuple[StepPlan, float]] = deque()
        """Steps being computed and their starts; time.monotonic()."""
        self._free_at = time.monotonic()
        """Time before which no further step begins, by the timeline of the device."""
        self._num_accepted = 0
        self._num_failed = 0
        self._executor = executor
        self._receivers = receivers
        self._senders = senders
        self._on_result = on_result
        self._on_error = on_error
        self._loop = asyncio.get_running_loop()
        self._min_step_seconds, self._slowdown = min_step_seconds, slowdown
        self._groups = groups
        has_times = executor.measures_time and not executor.is_asynchronous
        self._slow_steps = SlowSteps(read_wait_counters) if has_times else None
        self.is_closed = False
        """True once `close` was called, although a step may still be under way."""
        self._prepared = create_step_queue(max(len(receivers), len(senders)), receivers)
        self._computed: queue.SimpleQueue[ComputedStep | StepResult | None] = queue.SimpleQueue()
        """Input of the sampling thread; None after `close`."""
        samples_beside = executor.has_sampler and bool(receivers)
        self._has_sampling_thread = executor.is_asynchronous or samples_beside
        self._threads = [
            threading.Thread(target=self._run_thread, args=(run,), name=run.__name__, daemon=True)
            for run in [self._compute_steps] + [self._sample_steps] * self._has_sampling_thread
        ]
        for thread in self._threads:
            thread.start()

    def register(self, message: RegisterSequences) -> None:
        """Register sequences that later plans name.

        `on_result` is called when a grammar is ready, and for requests that cannot be sampled.
        """
        grammar = self._executor.register(message)
        if grammar is not None and self._executor.has_sampler:
            grammar.add_done_callback(lambda done: self._on_grammar(message, done))

    def close(self) -> None:
        """End the threads and drop the steps that are queued; blocks until the current step ends.

        No other method may be called at the same time or later. Nothing is reported from now on.
        The receivers and the groups are cancelled, but not closed. A step that several ranks
        compute, or an emulated device, ends at once.
        """
        self.is_closed = True
        # Each of these wakes one of the threads, whatever it waits for.
        self._prepared.close()
        self._computed.put(None)
        for receiver in self._receivers:
            receiver.cancel()
        self._cancel_groups()
        self._executor.cancel()
        self._executor.fail_sequences(CLOSED)
        for thread in self._threads:
            thread.join()
        self._prepared.free()
        # Others may keep this object for longer, but the memory of the groups is freed now.
        self._groups = None

    def _report(self, result: StepDone | GrammarReady) -> None:
        """Pass a message for the driver to the event loop; called on any thread."""
        self._loop.call_soon_threadsafe(self._deliver, result)

    def _deliver(self, result: StepDone | GrammarReady) -> None:
        if not self.is_closed:
            self._on_result(result)

    def _on_grammar(self, message: RegisterSequences, done: "Future[bytes]") -> None:
        """Report a compiled grammar, or the error; called on the compiling thread."""
        if self.is_closed or done.cancelled():
            return
        error = done.exception()
        reason = "" if error is None else str(error) or format_error(error)
        self._report(GrammarReady(message.seq, reason, message.n))

    @property
    def is_busy(self) -> bool:
        """True if some accepted step has not been computed yet."""
        return self.num_steps + self._num_failed < self._num_accepted

    @property
    def step_under_way(self) -> tuple[StepPlan, float] | None:
        """Plan of the oldest step being computed and its start, time.monotonic(); or None."""
        with suppress(IndexError):  # It may end meanwhile.
            return self._begun[0]
        return None

    @property
    def is_waiting(self) -> bool:
        """True if a step waits for another rank of the stage."""
        return any(group.is_waiting for group in self._groups or ())

    def run_plan(self, plan: StepPlan) -> None:
        """Build a step's inputs now and queue it for the compute thread."""
        self._num_accepted += 1
        batch: Batch | str
        try:
            batch = self._executor.prepare(plan)
        except Exception as error:
            log.exception("step %d could not be prepared", plan.step)
            batch = format_error(error)
            # Before it is queued: an earlier step in the queue may wait for one of its guides.
            self._executor.fail_plan(plan, batch)
        self._prepared.put(PreparedStep(plan, batch))

    def pop_step_times(self) -> tuple[list[StepTime], float]:
        """Return the times of steps computed since the last call.

        Returns:
            The times, and the time before which no other step has begun.
        """
        # In this order, because steps complete meanwhile.
        until = time.monotonic()
        with suppress(IndexError):
            until = self._begun[0][1]
        if not self._executor.measures_time:
            if self.is_busy:
                # A step may have begun on the device before this process noticed it.
                until = min(until, self._free_at)
            else:
                self._free_at = until
        times = [self._step_times.popleft() for _ in range(len(self._step_times))]
        return times, until

    def _run_thread(self, run: Callable[[], None]) -> None:
        try:
            self._executor.bind_thread()
            run()
        except BaseException as error:
            # Errors that closing the stage causes are not reported.
            if not self.is_closed:
                self._loop.call_soon_threadsafe(self._on_error, error)
            self._cancel_groups()

    def _cancel_groups(self) -> None:
        """End the step of all ranks, now and later: one of them has ended."""
        for group in self._groups or ():
            group.cancel()

    def _compute_steps(self) -> None:
        while (prepared := self._prepared.get()) is not None and not self.is_closed:
            plan, batch = prepared
            try:
                self._compute(plan, batch)
            except StepFailedError as error:
                if not isinstance(batch, str):
                    self._executor.fail_batch(batch, str(error))
                self._fail(plan, str(error))
            except EdgeClosedError:
                return

    def _compute(self, plan: StepPlan, batch: Batch | str) -> None:
        """Compute one step.

        Raises:
            StepFailedError: the step has no output, due to an error here, on another rank or on an
                earlier stage.
            EdgeClosedError: the stage is being closed.
            GroupClosedError: another rank has ended, or this stage is being closed.
        """
        hidden = self._begin(plan, batch)
        assert not isinstance(batch, str), "the step has failed"
        sender = self._senders[plan.lane] if self._senders else None
        if sender is not None:
            sender.mark_begin(plan.turn)
        begin = time.monotonic()
        self._begun.append((plan, begin))
        try:
            with torch.profiler.record_function(f"step {plan.step}"):
                output = self._executor.compute(batch, hidden)
        except Exception as error:
            self._begun.pop()
            if isinstance(error, (GroupClosedError, EdgeClosedError)):
                raise
            log.exception("step %d failed", plan.step)
            if self._groups is not None:
                # The others wait in the middle of the step.
                raise
            raise StepFailedError(format_error(error)) from error
        if not self._executor.is_asynchronous:
            self._slow_down(begin)
        if sender is not None:
            sender.send(plan.turn, output)
        if not self._executor.is_asynchronous:
            begin, end = self._executor.span(batch, begin, time.monotonic())
            self._record_time(plan.step, begin, end, end - begin)
            self._report_slow_step(plan, begin, end)
        if sender is None or self._executor.is_asynchronous:
            self._pass_on(ComputedStep(plan, batch, output))
        # Last, so that no other stage waits for it. A block without its checksum is computed again.
        self._executor.store_checksums(batch)

    def _begin(self, plan: StepPlan, batch: Batch | str) -> torch.Tensor | None:
        """Receive a step's activations and meet the other ranks.

        Returns:
            The activations; None on the first stage.

        Raises:
            StepFailedError: here, on another rank or on an earlier stage.
            EdgeClosedError: the stage is being closed.
            GroupClosedError: another rank has ended, or this stage is being closed.
        """
        hidden, failure = None, batch if isinstance(batch, str) else ""
        if self._receivers:
            try:
                num_tokens = sum(row.num_tokens for row in plan.rows)
                hidden = self._receivers[plan.lane].receive(plan.turn, num_tokens)
            except StepFailedError as error:
                failure = str(error)
        if self._groups is not None:
            failure = self._groups.layers.agree_on_step(plan.step, failure)
        if failure:
            raise StepFailedError(failure)
        return hidden

    def _slow_down(self, begin: float) -> float:
        """Sleep until a step has taken as long as configured; return the seconds slept.

        begin: start of the step; time.monotonic().
        """
        if not self._min_step_seconds and self._slowdown == 1:
            return 0.0
        elapsed = time.monotonic() - begin
        seconds = max(self._min_step_seconds, self._slowdown * elapsed) - elapsed
        if seconds > 0:
            time.sleep(seconds)
        return max(seconds, 0.0)

    def _record_time(self, step: int, begin: float, end: float, busy_seconds: float) -> None:
        """Count the oldest running step as computed."""
        self.num_steps += 1
        self.busy_seconds += busy_seconds
        self._step_times.append(StepTime(step, begin, end))
        self._free_at = end
        self._begun.popleft()

    def _report_slow_step(self, plan: StepPlan, begin: float, end: float) -> None:
        """Log why a step took several times as long as usual."""
        if self._slow_steps is not None:
            num_tokens = sum(row.num_tokens for row in plan.rows)
            if message := self._slow_steps.add(num_tokens, begin, end):
                log.warning("%s", message)

    def _fail(self, plan: StepPlan, error: str) -> None:
        """End the sequences of a step; those of other steps continue."""
        self._num_failed += 1
        if self._senders:
            self._senders[plan.lane].fail(plan.turn, error)
        else:
            self._pass_on(StepResult(plan.step, [], error))

    def _pass_on(self, item: ComputedStep | StepResult) -> None:
        """Finish a step, on the sampling thread if there is one; results keep their order."""
        if self._has_sampling_thread:
            self._computed.put(item)
        else:
            self._finish(item)

    def _sample_steps(self) -> None:
        while (item := self._computed.get()) is not None and not self.is_closed:
            self._finish(item)

    def _finish(self, item: ComputedStep | StepResult) -> None:
        """Wait for the device and sample, where that is left to do, and report the result."""
        details: list[SampleDetails] = []
        if isinstance(item, ComputedStep) and self._executor.is_asynchronous:
            self._wait_for_device(item)
        if not self._executor.has_sampler:
            return
        if isinstance(item, ComputedStep):
            step, batch = item.plan.step, item.batch
            try:
                sampled, details = self._executor.sample(batch, item.output)
                item = StepResult(step, sampled)
            except Exception as error:
                log.exception("step %d could not be sampled", step)
                self._executor.fail_batch(batch, format_error(error))
                item = StepResult(step, [], format_error(error))
        self._report(StepDone(item, details))

    def _wait_for_device(self, item: ComputedStep) -> None:
        """Wait until the device has computed a step.

        Raises:
            TransportError: the step was computed with activations that did not arrive.
        """
        device_time = self._executor.wait(item.batch)
        for receiver in self._receivers:
            receiver.check()
        end = time.monotonic()
        begin = end - device_time.elapsed
        if slept := self._slow_down(begin):
            end = time.monotonic()
        self._record_time(item.plan.step, begin, end, device_time.busy + slept)


def format_error(error: BaseException) -> str:
    """Return the type and message of an exception as one line."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def create_step_queue(num_lanes: int, receivers: Sequence[Receiver]) -> OneLaneQueue | TwoLaneQueue:
    """Return an empty queue of a stage's prepared steps, with or without overtaking.

    Args:
        num_lanes: 1 to compute steps in order, 2 if decode steps may overtake prefill steps.
        receivers: receiving ends of the connections to the previous stage, one per lane; none on
            the first stage.
    """
    return TwoLaneQueue(receivers) if num_lanes > 1 else OneLaneQueue()
