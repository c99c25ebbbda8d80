"""A stage of the pipeline during one generation: executor, edges, threads, sessions and driver.

Nothing of it outlives `close` but the weights, which the next instance of the same process takes
over.
"""

import asyncio
import gc
import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import zmq

from gllm.messages import codec
from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage
from gllm.messages.lifecycle import Hello, InitializeCache, LoadProgress, StageLoaded, StageReady
from gllm.messages.reports import StageTimes, StageUtilization
from gllm.messages.steps import GrammarReady, RegisterSequences, RunStep, StepDone
from gllm.observability.step_log import StepLogWriter
from gllm.runtime.assignment import StageAssignment
from gllm.runtime.bus import Hub, Peer, Spoke
from gllm.runtime.device import trim_memory
from gllm.runtime.driver import Driver
from gllm.runtime.driver_setup import create_scheduler, dispatch_to_driver
from gllm.runtime.executor import Executor
from gllm.runtime.plan_record import PlanRecord
from gllm.runtime.session import SessionError
from gllm.runtime.stage import StageRunner
from gllm.runtime.stage_loader import StageLoader
from gllm.runtime.threads import run_in_thread
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import StepPlan
from gllm.transport.base import EdgeLayout, Receiver, Sender
from gllm.transport.registry import open_edges

log = logging.getLogger(__name__)

LOAD_REPORT_SECONDS = 0.5
"""Interval between two reports of utilization and step times."""
LOST_SECONDS = 5.0
"""Time in which the parent closes this instance after another stage has ended."""


class StageInstance:
    """One stage of one generation; called on the event loop."""

    def __init__(
        self,
        assignment: StageAssignment,
        context: zmq.Context[zmq.Socket[bytes]],
        run: int,
        head: Spoke,
        on_error: Callable[[BaseException], None],
        previous: "StageInstance | None" = None,
    ) -> None:
        """Create an instance; on the first stage its hub is bound when this returns.

        Args:
            assignment: its descriptors belong to the instance from now on.
            context: of this process.
            run: number of this start of the parent.
            head: session with the parent, in the generation of the assignment.
            on_error: called with the error that ends the stage.
            previous: closed instance of this process; it is not used in any other way again.
        """
        self.assignment = assignment
        self._context, self._run, self._head = context, run, head
        self._on_error = on_error
        self._loader: StageLoader = StageLoader(
            assignment, self._send_progress, None if previous is None else previous._loader
        )
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        """Held while edges, caches and threads begin or end."""
        self._is_closed = self._is_freed = False
        self._edges: tuple[Receiver | None, Sender | None] = (None, None)
        self._runner: StageRunner | None = None
        self._driver: Driver | None = None
        self._hub: Hub | None = None
        """The driver's end of its sessions with the other stages."""
        self._spoke: Spoke | None = None
        """The other stages' end."""
        self._connected_senders: set[int] = set()
        """Workers that have reached the driver, its own included."""
        self._is_report_scheduled = False
        self._step_log: StepLogWriter | None = None
        self._plan_record: PlanRecord | None = None
        if assignment.stage == 0:
            self._hub = self._bind_hub()

    @property
    def step_under_way(self) -> tuple[StepPlan, float] | None:
        """Plan of the oldest step being computed and its start, time.monotonic(); or None."""
        return None if self._runner is None else self._runner.step_under_way

    @property
    def executor(self) -> Executor:
        """Executor of the stage, once it has loaded."""
        return self._loader.executor

    def load(self) -> None:
        """Load the weights and open the edges on a thread; report StageLoaded."""
        self._loader.start(self._on_weights, partial(self._call_soon, self._fail))

    def handle(self, messages: Iterable[AnyMessage]) -> None:
        """Handle messages of the parent and of other stages; an error ends the stage."""
        if self._is_closed:
            return
        try:
            for message in messages:
                self._handle_message(message)
            if self._driver is not None:
                self._driver.run_turn()
        except Exception as error:
            self._fail(error)

    async def close(self) -> None:
        """End threads and sessions, free edges and KV cache; keep the weights.

        A step that is being computed ends first. Weights that are being loaded go on loading, for
        the next instance.
        """
        self.disconnect()
        await run_in_thread(self._free)

    def disconnect(self) -> None:
        """End the sessions and the driver; nothing is handled or reported any more."""
        self._is_closed = True
        self._driver = None
        for file in (self._step_log, self._plan_record):
            if file is not None:
                file.close()
        self._step_log = self._plan_record = None
        for connection in (self._hub, self._spoke):
            if connection is not None:
                connection.close()

    def _free(self) -> None:
        with self._lock:
            if self._is_freed:
                return
            self._is_freed = True
            if self._runner is not None:
                self._runner.close()
                self._runner = None
            for end in self._edges:
                if end is not None:
                    end.close()
            self._edges = (None, None)
            self.assignment.close_descriptors()
            self._loader.close_executor()
        trim_memory()

    # Loading, on a thread.

    def _on_weights(self) -> None:
        """Open the edges and report StageLoaded; called on the loading thread."""
        backend, executor = self._loader.backend, self._loader.executor
        # One that was closed meanwhile leaves the weights to its successor.
        with self._lock:
            if self._is_closed:
                return
            # Before the rest of the memory is divided: edges take some, NCCL for example.
            self._edges = self._open_edges(backend.reserve())
        available_bytes = backend.available_bytes()
        trim_memory()
        # Loaded objects live as long as the process: the collector never has to visit them.
        if not gc.isenabled():
            gc.freeze()
            gc.enable()
        loaded = StageLoaded(
            self.assignment.stage,
            executor.weight_bytes,
            executor.block_bytes,
            available_bytes,
            executor.keeps_weights,
        )
        self._call_soon(self._send, loaded)

    def _send_progress(self, done_bytes: int, total_bytes: int) -> None:
        progress = LoadProgress(self.assignment.stage, done_bytes, total_bytes)
        self._call_soon(self._send, progress)

    def _call_soon(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function on the event loop, from any thread; the loop may have been closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _open_edges(self, scheduler: SchedulerConfig) -> tuple[Receiver | None, Sender | None]:
        """Open the edges to the neighbours; on a GPU this waits for them.

        scheduler: resolved except for the number of KV blocks.
        """
        assert scheduler.max_in_flight is not None
        assert scheduler.max_num_batched_tokens is not None
        backend, executor = self._loader.backend, self._loader.executor
        shape = EdgeLayout(
            scheduler.max_in_flight,
            scheduler.max_num_batched_tokens,
            executor.model.hidden_size,
            executor.dtype.itemsize,
        )
        return open_edges(
            self.assignment.incoming,
            self.assignment.outgoing,
            backend.transport,
            shape,
            executor.dtype,
            backend.streams,
            partial(self._call_soon, self._fail),
        )

    # Start.

    async def _start(self, num_blocks: int) -> None:
        """Allocate the KV cache and start the threads; on the first stage, create the driver."""
        assignment = self.assignment
        assert assignment.config.max_model_len is not None
        config = assignment.config.scheduler.resolve(
            assignment.num_stages, num_blocks, assignment.config.max_model_len
        )
        await run_in_thread(partial(self._allocate, num_blocks, config.block_size))
        if self._is_closed:
            return
        executor = self.executor
        executor.bind_thread()
        self._runner = StageRunner(
            executor,
            *self._edges,
            self._on_result,
            self._fail,
            assignment.config.debug_step_seconds,
        )
        if self._hub is None:
            self._spoke = self._connect(assignment.driver_address)
            self._send(StageReady(assignment.stage))
            return
        others = assignment.placement.senders[1:]
        scheduler, self._step_log = create_scheduler(assignment, config)
        if assignment.plan_record is not None:
            assert config.max_in_flight is not None
            self._plan_record = PlanRecord(
                assignment.plan_record, config.max_in_flight, config.max_num_seqs
            )
        self._driver = Driver(
            scheduler,
            self._handle_message,
            [Peer(self._hub, sender) for sender in others],
            self._head,
            last_stage_needs_prompts=executor.is_asynchronous,
            vocab_size=executor.model.vocab_size,
            plan_record=self._plan_record,
        )
        self._on_stage_connected(assignment.sender)

    def _allocate(self, num_blocks: int, block_size: int) -> None:
        """Allocate the KV cache and compile kernels, on a thread: that can take minutes."""
        with self._lock:
            if self._is_closed:
                return
            self.executor.bind_thread()
            self.executor.allocate(num_blocks, block_size)
            self._loader.backend.prepare_steps()

    def _on_started(self, starting: "asyncio.Task[None]") -> None:
        if not starting.cancelled() and (error := starting.exception()) is not None:
            self._fail(error)

    # Sessions.

    def _bind_hub(self) -> Hub:
        """Bind the driver's hub; the other stages connect after all have loaded."""
        assignment = self.assignment
        hub = Hub(self._context, self._run, codec.decode_for_driver)
        hub.advance(assignment.placement.generation)
        hub.bind(assignment.driver_address)
        for sender in assignment.placement.senders[1:]:
            hub.expect(sender)
        hub.start(
            lambda messages: self.handle(message for _, message in messages),
            lambda _, cause: self._on_lost(cause),
        )
        return hub

    def _connect(self, address: str) -> Spoke:
        """Connect to the driver's hub."""
        spoke = Spoke(
            self._context, self._run, self.assignment.sender, address, codec.decode_for_stage
        )
        spoke.advance(self.assignment.placement.generation)
        spoke.start(self.handle, self._on_lost)
        return spoke

    def _on_stage_connected(self, sender: int) -> None:
        """Report the driver's stage as ready once every stage has connected.

        The parent removes the socket's name when all stages are ready, so nothing can connect
        afterwards.
        """
        self._connected_senders.add(sender)
        if len(self._connected_senders) == self.assignment.num_stages:
            self._send(StageReady(0))

    def _on_lost(self, cause: str) -> None:
        """Fail, unless the parent closes this instance first because the other stage has ended."""
        error = SessionError(f"a session with another stage ended: {cause}")
        self._loop.call_later(LOST_SECONDS, self._fail, error)

    def _send(self, message: WireMessage) -> None:
        """Send a message to the parent, as long as it concerns the parent's generation."""
        if not self._is_closed:
            self._head.send(message)

    def _send_to_driver(self, message: StepDone | GrammarReady | StageTimes) -> None:
        if self._spoke is not None:
            self._spoke.send(message)
        else:
            self.handle([message])

    # Steps.

    def _handle_message(self, message: AnyMessage) -> None:
        match message:
            case RunStep(plan):
                self._running.run_plan(plan)
                self._schedule_report()
            case RegisterSequences():
                self._running.register(message)
            case InitializeCache(num_blocks):
                self._loop.create_task(self._start(num_blocks)).add_done_callback(self._on_started)
            case Hello(sender):
                self._on_stage_connected(sender)
            case _ if self._driver is not None:
                dispatch_to_driver(self._driver, message)
            case _:
                stage, name = self.assignment.stage, type(message).__name__
                raise ValueError(f"stage {stage} has no use for {name}")

    @property
    def _running(self) -> StageRunner:
        """The threads of the stage."""
        assert self._runner is not None, "steps come once the stage has reported StageReady"
        return self._runner

    def _on_result(self, result: StepDone | GrammarReady) -> None:
        """Send a result of the last stage to the driver."""
        if not self._is_closed:
            self._send_to_driver(result)

    def _schedule_report(self) -> None:
        """Report utilization in half a second, unless a report is scheduled already."""
        if not self._is_report_scheduled:
            self._is_report_scheduled = True
            self._loop.call_later(LOAD_REPORT_SECONDS, self._report_load)

    def _report_load(self) -> None:
        """Send this stage's totals to the parent and its step times to the driver."""
        self._is_report_scheduled = False
        if self._is_closed:
            return
        runner, backend = self._running, self._loader.backend
        stage = self.assignment.stage
        self._send(
            StageUtilization(
                stage,
                runner.num_steps,
                runner.busy_seconds,
                backend.host_seconds,
                backend.num_compilations,
            )
        )
        times = StageTimes(stage, *runner.pop_step_times())
        self._send_to_driver(times)
        if self._step_log is not None:
            self._step_log.flush()
        if runner.is_busy or times.steps:
            # Once more after the last step, so that bubbles are known up to its end.
            self._schedule_report()

    def _fail(self, error: BaseException) -> None:
        if not self._is_closed:
            self._on_error(error)
