"""Worker process: one pipeline stage, and on the first stage the driver.

It connects to the parent and to the other stages, loads the stage and dispatches messages.
`gllm.runtime.__main__` starts it.
"""

import asyncio
import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import setproctitle
import uvloop
import zmq

from gllm.config.field_types import FieldError
from gllm.messages import codec
from gllm.messages.codec import AnyMessage
from gllm.messages.control import ResetPrefixCache, StartProfile, StopProfile
from gllm.messages.lifecycle import (
    Hello,
    InitializeCache,
    LoadProgress,
    Shutdown,
    StageFailed,
    StageLoaded,
    StageReady,
)
from gllm.messages.reports import StageTimes, StageUtilization
from gllm.messages.requests import AbortSequences, RejectedRequest, SubmitRequest
from gllm.messages.steps import GrammarReady, RegisterSequences, RunStep, StepDone
from gllm.models.config import ModelConfig, read_config
from gllm.models.errors import ModelError
from gllm.observability.logs import configure_logging
from gllm.observability.step_log import LoggedScheduler, StepLogWriter
from gllm.observability.step_log import StartEvent as LogStart
from gllm.runtime.backend import DeviceBackend
from gllm.runtime.bus import Decode, Hub, Peer, Spoke
from gllm.runtime.device import count_gpus, set_num_threads, threads_per_stage, trim_memory
from gllm.runtime.driver import Driver
from gllm.runtime.profiler import TorchProfiler
from gllm.runtime.session import SessionError
from gllm.runtime.spec import WorkerSpec
from gllm.runtime.stage import StageRunner, format_error
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.scheduler import Scheduler
from gllm.transport.base import EdgeLayout, Receiver, Sender
from gllm.transport.registry import open_edges

log = logging.getLogger(__name__)

LOAD_REPORT_SECONDS = 0.5
"""Interval between two reports of utilization and step times."""
LOST_SECONDS = 5.0
"""Time in which the parent ends this worker after another stage has ended."""


class Worker:
    """Event loop side of a worker process."""

    _backend: DeviceBackend
    _edges: tuple[Receiver | None, Sender | None]
    _runner: StageRunner

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.done = asyncio.Event()
        """Set when the process has to end."""
        self.has_failed = False
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._frontend = self._connect(spec.head_address, codec.decode_for_worker)
        self._hub: Hub | None = None
        """The driver's end of its sessions with the other stages."""
        self._spoke: Spoke | None = None
        """The other stages' end."""
        self._driver: Driver | None = None
        self._connected_senders: set[int] = set()
        """Workers that have reached the driver, its own included."""
        self._is_report_scheduled = False
        self._step_log: StepLogWriter | None = None
        self._profiler = TorchProfiler(spec.stage, self._frontend)

    async def run(self) -> None:
        """Load the stage and handle messages until the parent's Shutdown or an error."""
        self._frontend.start(
            self._handle, lambda cause: self._fail(SessionError(f"the parent was lost: {cause}"))
        )
        if self.spec.stage == 0:
            self._bind_hub()
        loading = asyncio.ensure_future(run_in_thread(self._load))
        loading.add_done_callback(self._on_loaded)
        await self.done.wait()
        # Loading may wait for a neighbour that has exited.
        loading.cancel()
        if self._step_log is not None:
            self._step_log.close()
        for connection in (self._frontend, self._hub, self._spoke):
            if connection is not None:
                connection.close()
        self._context.term()

    def _connect(self, address: str, decode: Decode) -> Spoke:
        spoke = Spoke(self._context, self.spec.run, self.spec.sender, address, decode)
        spoke.advance(1)
        return spoke

    def _bind_hub(self) -> None:
        """Bind the driver's hub; the other stages connect after all have loaded."""
        self._hub = Hub(self._context, self.spec.run, codec.decode_for_driver)
        self._hub.advance(1)
        self._hub.bind(self.spec.driver_address)
        for sender in self.spec.senders[1:]:
            self._hub.expect(sender)
        self._hub.start(
            lambda messages: self._handle([message for _, message in messages]),
            lambda _, cause: self._on_lost(cause),
        )

    def _on_loaded(self, loading: "asyncio.Future[None]") -> None:
        if not loading.cancelled() and (error := loading.exception()) is not None:
            self._fail(error)

    def _load(self) -> None:
        """Load the weights and open the edges; runs on a thread of its own."""
        spec = self.spec
        set_num_threads(threads_per_stage(spec.config.threads, spec.num_stages))
        model = read_config(Path(spec.model_folder))
        backend = create_backend(spec, model, count_gpus(spec.config.device))
        backend.executor.load(Path(spec.model_folder), self._report_progress)
        self._backend = backend
        # Before the rest of the memory is divided: edges take some, NCCL for example.
        self._edges = self._open_edges(backend.reserve())
        available_bytes = backend.available_bytes()
        trim_memory()
        # Loaded objects live as long as the process: the collector never has to visit them.
        gc.freeze()
        gc.enable()
        executor = backend.executor
        loaded = StageLoaded(
            spec.stage, executor.weight_bytes, executor.block_bytes, available_bytes
        )
        self._loop.call_soon_threadsafe(self._frontend.send, loaded)

    def _report_progress(self, done_bytes: int, total_bytes: int) -> None:
        progress = LoadProgress(self.spec.stage, done_bytes, total_bytes)
        self._loop.call_soon_threadsafe(self._frontend.send, progress)

    def _handle(self, messages: list[AnyMessage]) -> None:
        try:
            for message in messages:
                self._handle_message(message)
            if self._driver is not None:
                self._driver.run_turn()
        except Exception as error:
            self._fail(error)

    def _handle_message(self, message: AnyMessage) -> None:
        match message:
            case RunStep(plan):
                self._runner.run_plan(plan)
                self._schedule_report()
            case RegisterSequences():
                self._runner.register(message)
            case InitializeCache(num_blocks):
                self._start_stage(num_blocks)
            case Hello(sender):
                self._on_stage_connected(sender)
            case StartProfile() | StopProfile():
                self._profiler.handle(message)
            case Shutdown():
                self.done.set()
            case _ if self._driver is not None:
                self._handle_driver_message(self._driver, message)
            case _:
                raise ValueError(f"stage {self.spec.stage} has no use for {type(message).__name__}")

    def _handle_driver_message(self, driver: Driver, message: AnyMessage) -> None:
        match message:
            case SubmitRequest():
                driver.submit(message)
            case RejectedRequest():
                driver.reject(message)
            case AbortSequences():
                driver.abort(message)
            case ResetPrefixCache():
                driver.reset_prefix_cache(message)
            case StepDone():
                driver.commit(message)
            case GrammarReady():
                driver.on_grammar_ready(message)
            case StageTimes():
                driver.on_stage_times(message)
            case _:
                raise ValueError(f"the driver has no use for {type(message).__name__}")

    def _start_stage(self, num_blocks: int) -> None:
        """Allocate the KV cache and start the threads; on the first stage, create the driver."""
        spec, executor = self.spec, self._backend.executor
        assert spec.config.max_model_len is not None
        scheduler = spec.config.scheduler.resolve(
            spec.num_stages, num_blocks, spec.config.max_model_len
        )
        executor.bind_thread()
        executor.allocate(num_blocks, scheduler.block_size)
        self._backend.prepare_steps()
        self._runner = StageRunner(executor, *self._edges, self._on_result, self._fail)
        if spec.stage > 0:
            self._spoke = self._connect(spec.driver_address, codec.decode_for_stage)
            self._spoke.start(self._handle, self._on_lost)
            self._frontend.send(StageReady(spec.stage))
            return
        assert self._hub is not None
        self._driver = Driver(
            self._create_scheduler(scheduler),
            self._handle_message,
            [Peer(self._hub, sender) for sender in spec.senders[1:]],
            self._frontend,
            last_stage_needs_prompts=executor.is_asynchronous,
            vocab_size=executor.model.vocab_size,
        )
        self._on_stage_connected(spec.sender)

    def _open_edges(self, scheduler: SchedulerConfig) -> tuple[Receiver | None, Sender | None]:
        """Open the edges to the neighbours; on a GPU this waits for them.

        scheduler: resolved except for the number of KV blocks.
        """
        assert scheduler.max_in_flight is not None
        assert scheduler.max_num_batched_tokens is not None
        executor = self._backend.executor
        shape = EdgeLayout(
            scheduler.max_in_flight,
            scheduler.max_num_batched_tokens,
            executor.model.hidden_size,
            executor.dtype.itemsize,
        )
        return open_edges(
            self.spec.incoming,
            self.spec.outgoing,
            self._backend.transport,
            shape,
            executor.dtype,
            self._backend.streams,
            self._on_edge_error,
        )

    def _on_stage_connected(self, sender: int) -> None:
        """Report the driver's stage as ready once every stage has connected.

        The parent removes the sockets' names when all stages are ready, so nothing can connect
        afterwards.
        """
        self._connected_senders.add(sender)
        if len(self._connected_senders) == self.spec.num_stages:
            self._frontend.send(StageReady(0))

    def _create_scheduler(self, config: SchedulerConfig) -> Scheduler:
        """Create the pipeline's scheduler; with a step log, one that records its calls."""
        engine = self.spec.config
        if engine.step_log is None:
            return Scheduler(config)
        self._step_log = StepLogWriter(engine.step_log)
        now = time.monotonic()
        self._step_log.write(
            LogStart(now, engine.model, self.spec.layer_counts, config, "driver", warm_ups=1)
        )
        return LoggedScheduler(config, self._step_log.write, time.monotonic)

    def _on_result(self, result: StepDone | GrammarReady) -> None:
        """Send a result of the last stage to the driver."""
        if self.done.is_set():
            return  # The sockets are closed and nobody waits for late results.
        if self._spoke is not None:
            self._spoke.send(result)
        else:
            self._handle([result])

    def _schedule_report(self) -> None:
        """Report utilization in half a second, unless a report is scheduled already."""
        if not self._is_report_scheduled:
            self._is_report_scheduled = True
            self._loop.call_later(LOAD_REPORT_SECONDS, self._report_load)

    def _report_load(self) -> None:
        """Send this stage's totals to the frontend and its step times to the driver."""
        self._is_report_scheduled = False
        if self.done.is_set():
            return
        runner, backend = self._runner, self._backend
        self._frontend.send(
            StageUtilization(
                self.spec.stage,
                runner.num_steps,
                runner.busy_seconds,
                backend.host_seconds,
                backend.num_compilations,
            )
        )
        times = StageTimes(self.spec.stage, *runner.pop_step_times())
        if self._spoke is not None:
            self._spoke.send(times)
        else:
            self._handle([times])
        if self._step_log is not None:
            self._step_log.flush()
        if runner.is_busy or times.steps:
            # Once more after the last step, so that bubbles are known up to its end.
            self._schedule_report()

    def _on_edge_error(self, error: BaseException) -> None:
        """Fail because an edge is broken; called on the edge's thread."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def _on_lost(self, cause: str) -> None:
        """Fail, unless the parent ends this worker first because the other stage has exited."""
        error = SessionError(f"a session with another stage ended: {cause}")
        self._loop.call_later(LOST_SECONDS, self._fail, error)

    def _fail(self, error: BaseException) -> None:
        """Report the error to the parent and end, unless this worker has ended."""
        if self.done.is_set():
            return
        if not isinstance(error, ModelError | FieldError):
            log.error("the stage failed", exc_info=error)
        self._frontend.send(StageFailed(self.spec.stage, format_error(error)))
        self.has_failed = True
        self.done.set()


def create_backend(spec: WorkerSpec, model: ModelConfig, num_gpus: int) -> DeviceBackend:
    """Create the backend of a stage: CUDA if there are GPUs to use, else CPU.

    Only the chosen backend is imported.

    Raises:
        FieldError: weights, KV cache or attention cannot be as configured.
    """
    if num_gpus:
        from gllm.runtime.cuda.backend import CudaBackend

        return CudaBackend(spec, model, num_gpus)
    from gllm.runtime.cpu.backend import CpuBackend

    return CpuBackend(spec, model)


async def run_in_thread(function: Callable[[], None]) -> None:
    """Run a function on a thread that ends with it.

    OpenMP gives every thread that forks its own helpers and keeps them as long as the thread lives;
    with more of them than cores it does not spin at barriers, and the compute thread's steps take a
    tenth longer.
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
        # The caller may have stopped waiting.
        loop.call_soon_threadsafe(lambda: done.cancelled() or complete())

    threading.Thread(target=run, name=function.__name__, daemon=True).start()
    await done


async def serve(spec: WorkerSpec) -> bool:
    """Run a worker until it is shut down; return True if it did not fail."""
    worker = Worker(spec)
    await worker.run()
    return not worker.has_failed


def run_worker(stage: int, spec_line: bytes) -> None:
    """Run the worker process of a stage; does not return.

    Args:
        stage: index of the stage, for the process title.
        spec_line: a WorkerSpec as JSON. Empty if the parent has exited: the process then exits
            with 1.
    """
    if not spec_line:
        os._exit(1)
    setproctitle.setproctitle(f"gllm-stage-{stage}")
    spec = msgspec.json.decode(spec_line, type=WorkerSpec)
    configure_logging(spec.logs, stage)
    is_success = uvloop.run(serve(spec))
    # Threads that wait for steps are daemons; nothing is left to clean up.
    os._exit(0 if is_success else 1)
