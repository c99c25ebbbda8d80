"""A rank of a stage during one epoch: its resources, sessions, reports and driver.

Nothing of it outlives `close` but the weights, which the next instance of the same process takes
over.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import zmq

from gllm.kernels.all_reduce import GroupClosedError
from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage, decode_from_kv_mover, encode
from gllm.messages.kv_transfer import (
    CopyKvBlocks,
    KvBlocksCopied,
    KvMachineCommand,
    KvMachineReport,
    KvMoverConnected,
    KvMoverGone,
    KvMoverStuck,
    KvReport,
)
from gllm.messages.lifecycle import Hello, InitializeCache, LoadProgress, StageReady
from gllm.messages.reports import STAGE_REPORT_SECONDS, StageTimes, StageUtilization
from gllm.messages.steps import GrammarReady, RegisterSequences, RunStep, StepDone
from gllm.observability.logged_scheduler import LoggedScheduler
from gllm.observability.step_log import (
    DriverStepLog,
    RestartEvent,
    StartEvent,
    continue_step_log,
)
from gllm.runtime.driver.driver import Driver, DriverPacing
from gllm.runtime.driver.hash_file import HashFile
from gllm.runtime.driver.plan_record import PlanRecord
from gllm.runtime.head.assignment import StageAssignment
from gllm.runtime.messaging.bus import Spoke
from gllm.runtime.node.machine import process_age_seconds
from gllm.runtime.worker.executor import Executor
from gllm.runtime.worker.stage import StageRunner
from gllm.runtime.worker.stage_resources import StageLoader, StageResources
from gllm.runtime.worker.stage_sessions import StageSessions
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.scheduler import Scheduler
from gllm.transport.descriptors import DescriptorChannel, DescriptorError

log = logging.getLogger(__name__)

TURN_SECONDS = 1.0
"""Interval at which the driver runs without messages while KV blocks are reserved for other
engines."""


def create_scheduler(
    assignment: StageAssignment, config: SchedulerConfig
) -> tuple[Scheduler, DriverStepLog | None]:
    """Create the scheduler of the pipeline, and its step log if one is configured.

    Args:
        assignment: options of the first stage, in whose worker the scheduler runs.
        config: scheduler's configuration without automatic values.

    Returns:
        The scheduler, and the writer of the step log; None without a log.
    """
    engine = assignment.config
    if engine.step_log is None:
        return Scheduler(config, output_lengths=assignment.output_lengths), None
    now, layers = time.monotonic(), assignment.layer_counts
    degrees = list(assignment.degrees) if max(assignment.degrees) > 1 else []
    start = StartEvent(
        now,
        engine.model,
        layers,
        config,
        "driver",
        warm_ups=1,
        degrees=degrees,
        process_seconds=process_age_seconds(),
    )
    restart = RestartEvent(
        now,
        assignment.placement.epoch,
        assignment.restart_cause,
        assignment.num_resumed_requests,
        layers,
        config,
        warm_ups=1,
        output_lengths=assignment.output_lengths,
        degrees=degrees,
    )
    step_log = continue_step_log(engine.step_log, start, restart)
    scheduler = LoggedScheduler(config, step_log.write, time.monotonic, assignment.output_lengths)
    return scheduler, step_log


def open_hash_file(assignment: StageAssignment, num_blocks: int) -> HashFile | None:
    """Open the file with the hashes of the KV blocks that outlives the driver.

    Args:
        assignment: assignment of the driver's worker.
        num_blocks: KV blocks on each stage.

    Returns:
        The file; None if there is none, or if it cannot have its size.
    """
    if assignment.hash_file is None:
        return None
    try:
        return HashFile(assignment.hash_file, num_blocks)
    except OSError as error:
        log.warning("KV blocks are computed again after a death (%s)", error.strerror)
        return None


async def run_in_thread(function: Callable[[], None]) -> None:
    """Run a function on a new thread and wait for it, so that its helper threads end too.

    OpenMP, which torch uses, and the compiled kernels give every thread helpers of its own and keep
    them as long as the thread lives.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            complete = partial(done.set_exception, error)
        else:
            complete = partial(done.set_result, None)
        # The caller may have stopped waiting, and the loop may have been closed.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: done.cancelled() or complete())

    name = getattr(function, "__name__", "run_in_thread")
    threading.Thread(target=run, name=name, daemon=True).start()
    await done


class StageInstance:
    """One rank of a stage, from a start or recovery of the pipeline to the next.

    It loads weights, opens connections and runs steps; on rank 0 of stage 0 it runs the driver too.
    Called on the event loop.
    """

    def __init__(
        self,
        assignment: StageAssignment,
        context: zmq.Context[zmq.Socket[bytes]],
        run: int,
        head: Spoke,
        on_error: Callable[[BaseException], None],
        previous: "StageInstance | None" = None,
        prepared: Sequence[StageLoader] = (),
    ) -> None:
        """Create an instance; if it has the driver, its hub is bound when this returns.

        Args:
            assignment: its descriptors belong to the instance from now on.
            context: ZeroMQ context of this process.
            run: number of this start of the parent.
            head: session with the parent, in the epoch of the assignment.
            on_error: called with the error that ends the stage.
            previous: closed instance of this process; it is not used in any other way again.
            prepared: layers that were loaded for this instance, or for one of several stages.
        """
        self.assignment = assignment
        self._head = head
        self._on_error = on_error
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._resources: StageResources = StageResources(
            assignment,
            partial(self._call_soon, self._send_progress),
            partial(self._call_soon, self._fail),
            None if previous is None else previous._resources,
            prepared,
        )
        self._sessions = StageSessions(assignment, context, run, self.handle, self._fail)
        self._report_timer: asyncio.TimerHandle | None = None
        """Next report of the totals and step times."""
        self._driver: Driver | None = None
        self._kv_mover: DescriptorChannel | None = None
        """Channel from the driver to the KV mover, which reads it as long as it runs. The first
        worker of another machine passes commands and reports on."""
        self._kv_connection = 0
        """Number of that channel."""
        self._turn_timer: asyncio.TimerHandle | None = None
        """Next turn of a driver whose transfers of KV blocks have leases."""
        self._step_log: DriverStepLog | None = None
        self._plan_record: PlanRecord | None = None
        self._hash_file: HashFile | None = None

    @property
    def runner(self) -> StageRunner | None:
        """Threads that compute and sample; None while the stage runs no plans."""
        return self._resources.runner

    @property
    def executor(self) -> Executor:
        """Executor of the stage, once it has loaded."""
        return self._resources.executor

    @property
    def loader(self) -> StageLoader:
        """Loader of the weights."""
        return self._resources.loader

    @property
    def has_leases(self) -> bool:
        """True while KV blocks are reserved for other engines for a limited time."""
        driver = self._driver
        return driver is not None and driver.kv is not None and driver.kv.is_active

    def load(self) -> None:
        """Load the weights, open edges and groups on a thread; report StageLoaded."""
        self._resources.load(partial(self._call_soon, self._send))

    def handle(self, messages: Iterable[AnyMessage]) -> None:
        """Handle messages of the parent and of other stages; an error ends the stage."""
        if self._is_closed:
            return
        try:
            for message in messages:
                self._handle_message(message)
            if self._driver is not None:
                self._driver.run_iteration()
                self._schedule_turn()
        except Exception as error:
            self._fail(error)

    def connect_kv_mover(self, channel: DescriptorChannel) -> None:
        """Connect the driver to the `gllm-link` process, over a channel that this object closes."""
        if self._kv_mover is not None:
            # The one before has ended, and this is read first.
            self._close_kv_mover()
            self._report_kv(KvMoverGone())
        kv = None if self._driver is None else self._driver.kv
        if kv is None and (self._driver is not None or self.assignment.machine == 0):
            channel.close()
            return
        self._kv_mover = channel
        self._kv_connection += 1
        if kv is not None:
            kv.connect(lambda command: channel.send(encode(command)))
        else:
            connected = KvMoverConnected(self._kv_connection)
            self._sessions.send_to_driver(KvMachineReport(self.assignment.machine, connected))
        self._loop.add_reader(channel.fileno(), self._read_kv_mover)

    def _read_kv_mover(self) -> None:
        """Handle a report of the KV mover, or its end."""
        assert self._kv_mover is not None
        report: KvReport
        try:
            payload, _ = self._kv_mover.receive()
            report = decode_from_kv_mover(payload)
        except (DescriptorError, OSError):
            self._close_kv_mover()
            report = KvMoverGone()
        self._report_kv(report)

    def _report_kv(self, report: KvReport) -> None:
        """Pass a report of this machine's KV mover to the driver, here or on another machine."""
        if self.assignment.machine == 0:
            self.handle([report])
        else:
            self._sessions.send_to_driver(KvMachineReport(self.assignment.machine, report))

    def _command_kv_mover(self, message: KvMachineCommand) -> None:
        """Pass a command of the driver to this machine's KV mover, unless that has ended."""
        if self._kv_mover is None or message.connection != self._kv_connection:
            return
        try:
            self._kv_mover.send(encode(message.command))
        except DescriptorError as error:
            # The rest of this command may be missing. The end of the channel follows.
            self._kv_connection += 1
            if isinstance(error.__cause__, BlockingIOError):
                self._send(KvMoverStuck(self.assignment.machine))

    def _close_kv_mover(self) -> None:
        if self._kv_mover is not None:
            self._loop.remove_reader(self._kv_mover.fileno())
            self._kv_mover.close()
            self._kv_mover = None

    async def close(self) -> None:
        """End threads and sessions, and free edges and KV cache; the weights stay in memory.

        A step that is being computed ends first. Weights that are being loaded go on loading, for
        the next instance.
        """
        self.disconnect()
        await run_in_thread(self._resources.free)

    def disconnect(self) -> None:
        """End the sessions and the driver; later messages are ignored."""
        self._is_closed = True
        self._resources.cancel()
        self._driver = None
        self._close_kv_mover()
        for timer in (self._turn_timer, self._report_timer):
            if timer is not None:
                timer.cancel()
        for file in (self._step_log, self._plan_record, self._hash_file):
            if file is not None:
                file.close()
        self._step_log = self._plan_record = self._hash_file = None
        self._sessions.close()

    async def _start(self, num_blocks: int, num_state_slots: int) -> None:
        """Allocate the KV cache and start the threads; create the driver if it belongs here."""
        assignment = self.assignment
        config = assignment.resolve_scheduler(num_blocks, num_state_slots)
        sizes = num_blocks, config.block_size, num_state_slots
        await run_in_thread(partial(self._resources.allocate, *sizes))
        if self._is_closed:
            return
        self._resources.start_threads(self._on_result, self._on_thread_error)
        if not assignment.has_driver:
            self._sessions.connect()
            self._send_ready()
            return
        self._create_driver(config)
        self._on_stage_connected(assignment.sender)

    def _create_driver(self, config: SchedulerConfig) -> None:
        """Create the driver of the epoch.

        config: resolved.
        """
        assignment, executor = self.assignment, self.executor
        if executor.num_staging_blocks:
            # A prompt is copied once it is computed.
            config = replace(config, kv_push="off")
        assert config.max_in_flight is not None
        scheduler, self._step_log = create_scheduler(assignment, config)
        if assignment.plan_record is not None:
            self._plan_record = PlanRecord(
                assignment.plan_record,
                config.max_in_flight,
                config.max_num_seqs,
                config.num_lanes,
            )
        if self._resources.keeps_kv_cache:
            self._hash_file = open_hash_file(assignment, config.num_blocks)
        pacing = None
        # As many micro-batches as stages are a fixed depth.
        if assignment.has_tcp_edges and config.max_in_flight > config.stages:
            bytes_per_token = executor.activation_width * executor.dtype.itemsize
            pacing = DriverPacing(scheduler, bytes_per_token)
        other_ranks, other_stages = self._sessions.peers
        self._driver = Driver(
            scheduler,
            self._handle_message,
            [*other_stages],
            self._head,
            last_stage_needs_prompts=executor.needs_all_prompts,
            vocab_size=executor.model.vocab_size,
            plan_record=self._plan_record,
            first_stage_ranks=other_ranks,
            pacing=pacing,
            has_kv_mover=assignment.config.has_kv_mover,
            kv_machines=self._sessions.machines,
            num_staging_blocks=executor.num_staging_blocks,
            num_workers=len(assignment.placement.workers),
            all_stages_need_prompts=executor.model.per_layer_embedding is not None,
            hash_file=self._hash_file,
            has_kv_disk=assignment.config.kv_cache_disk is not None,
            verifies_grammars=executor.verifies_grammars,
        )
        if self._driver.kv is not None:
            self._driver.kv.fetch_choice = assignment.config.kv_fetch

    def _schedule_turn(self) -> None:
        """Take a turn later if leases of KV blocks can end without a message."""
        if self.has_leases and self._turn_timer is None:
            self._turn_timer = self._loop.call_later(TURN_SECONDS, self._on_turn_timer)

    def _on_turn_timer(self) -> None:
        self._turn_timer = None
        self.handle([])

    def _on_started(self, starting: "asyncio.Task[None]") -> None:
        if not starting.cancelled() and (error := starting.exception()) is not None:
            self._fail(error)

    def _on_stage_connected(self, sender: int) -> None:
        """Report the driver's worker as ready once every worker has connected."""
        if self._sessions.on_connected(sender):
            self._send_ready()

    def _send_ready(self) -> None:
        """Report that this worker runs steps."""
        layout, intact = self._resources.kv_layout, self._resources.intact
        self._send(StageReady(self.assignment.stage, layout, intact))

    def _handle_message(self, message: AnyMessage) -> None:
        match message:
            case RunStep(plan):
                self._running.run_plan(plan)
                self._schedule_report()
            case RegisterSequences():
                self._running.register(message)
            case InitializeCache(num_blocks, num_state_slots):
                start = self._loop.create_task(self._start(num_blocks, num_state_slots))
                start.add_done_callback(self._on_started)
            case Hello(sender):
                self._on_stage_connected(sender)
            case KvMachineCommand():
                self._command_kv_mover(message)
            case CopyKvBlocks():
                self._resources.copy_kv_blocks(message, partial(self._call_soon, self._on_copied))
            case _ if self._driver is not None:
                self._driver.handle(message)
            case _:
                name = type(message).__name__
                raise ValueError(f"{self.assignment.name} has no use for {name}")

    @property
    def _running(self) -> StageRunner:
        """The threads of the stage."""
        assert self.runner is not None, "steps come after StageReady"
        return self.runner

    def _on_copied(self, report: KvBlocksCopied) -> None:
        """Report to the driver that blocks were copied."""
        if not self._is_closed:
            self._sessions.send_to_driver(report)

    def _on_result(self, result: StepDone | GrammarReady) -> None:
        """Send a result of the last stage to the driver."""
        if not self._is_closed:
            self._sessions.send_to_driver(result)

    def _schedule_report(self) -> None:
        """Report in STAGE_REPORT_SECONDS, unless a report is scheduled already."""
        if self._report_timer is None and not self._is_closed:
            self._report_timer = self._loop.call_later(STAGE_REPORT_SECONDS, self._report)

    def _report(self) -> None:
        """Send totals to the parent; send step times to the driver, from the ranks 0."""
        self._report_timer = None
        place, runner, backend = self.assignment.place, self._running, self._resources.backend
        self._send(
            StageUtilization(
                place.stage,
                runner.num_steps,
                runner.busy_seconds,
                backend.host_seconds,
                backend.num_compilations,
                place.rank,
                backend.late_seconds,
            )
        )
        times = StageTimes(place.stage, *runner.pop_step_times())
        if not place.rank:
            self._sessions.send_to_driver(times)
            if self._step_log is not None:
                self._step_log.flush()
        if runner.is_busy or times.steps:
            # Once more after the last step, so that bubbles are known up to its end.
            self._schedule_report()

    def _send_progress(self, done_bytes: int, total_bytes: int) -> None:
        self._send(LoadProgress(self.assignment.stage, done_bytes, total_bytes))

    def _send(self, message: WireMessage) -> None:
        """Send a message to the parent, as long as it concerns the parent's epoch."""
        if not self._is_closed:
            self._head.send(message)

    def _call_soon(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function on the event loop, from any thread; the loop may have been closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _on_thread_error(self, error: BaseException) -> None:
        """Report an error of the threads; the error of another rank is reported by that rank."""
        if isinstance(error, GroupClosedError):
            self._sessions.fail_later(error)
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._is_closed:
            self._on_error(error)
