"""A worker process: one pipeline stage, and on the first stage the driver.

Owns the process's life: handshake with the parent, links to its neighbours, its end. Knows nothing
of requests (driver.py) and arithmetic (executor.py). __main__.py comes before it.
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
from typing import TYPE_CHECKING, Any

import msgspec
import setproctitle
import uvloop
import zmq

from gllm.config.field_types import FieldError
from gllm.kernels.native.library import share_measurements
from gllm.messages.codec import AnyMessage
from gllm.messages.control import Profile, ResetPrefixCache
from gllm.messages.lifecycle import (
    InitializeCache,
    LoadProgress,
    Shutdown,
    StageConnected,
    StageFailed,
    StageLoaded,
    StageReady,
)
from gllm.messages.reports import StageTimes, StageUtilization
from gllm.messages.requests import AbortSequences, RejectedRequest, SubmitRequest
from gllm.messages.steps import GrammarReady, RegisterSequences, RunStep, StepDone
from gllm.models.config import read_config
from gllm.models.errors import ModelError
from gllm.observability.logs import configure_logging
from gllm.observability.step_log import LoggedScheduler, StepLogWriter
from gllm.observability.step_log import StartEvent as LogStart
from gllm.runtime.bus import Inbox, Outbox
from gllm.runtime.device import gpus, return_memory, set_threads, threads
from gllm.runtime.driver import Driver
from gllm.runtime.executor import StageExecutor
from gllm.runtime.profiler import TorchProfiler
from gllm.runtime.spec import WorkerSpec
from gllm.runtime.stage import Stage, describe
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.scheduler import Scheduler
from gllm.transport.base import EdgeShape, Receiver, Sender
from gllm.transport.registry import open_edges

if TYPE_CHECKING:
    from gllm.runtime.cuda.start import OnGpu

log = logging.getLogger(__name__)

LOAD_REPORT_SECONDS = 0.5


class Worker:
    """The worker's state between messages."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.done = asyncio.Event()
        self.failed = False
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = Inbox(self._context, spec.inboxes[spec.stage])
        self._frontend = Outbox(self._context, spec.frontend, spec.stage)
        # The driver sends to all other stages, and they to the driver.
        receivers = range(1, spec.stages) if spec.stage == 0 else range(1)
        self._stages = {
            stage: Outbox(self._context, spec.inboxes[stage], spec.stage) for stage in receivers
        }
        self._driver: Driver | None = None
        self._linked: set[int] = set()
        """Stages that the driver has heard of; its own among them once it has started."""
        self._reporting = False
        self._log: StepLogWriter | None = None
        self._profiler = TorchProfiler(spec.stage, self._frontend)
        self._gpu: OnGpu | None = None

    async def run(self) -> None:
        """From loading to the parent's Shutdown, or a fault."""
        self._inbox.start(self._handle, self._fail)
        loading = asyncio.ensure_future(in_own_thread(self._load))
        loading.add_done_callback(self._on_loaded)
        await self.done.wait()
        # It may wait for a neighbour that is gone.
        loading.cancel()
        self._inbox.close()
        if self._log is not None:
            self._log.close()
        for outbox in (self._frontend, *self._stages.values()):
            outbox.close()
        self._context.term()

    def _on_loaded(self, loading: "asyncio.Future[None]") -> None:
        if not loading.cancelled() and (error := loading.exception()) is not None:
            self._fail(error)

    def _load(self) -> None:
        """Read the weights; on a thread, so that the process answers meanwhile."""
        spec = self.spec
        set_threads(threads(spec.config.threads, spec.stages))
        model = read_config(Path(spec.folder))
        part = spec.stage, spec.stages, range(*spec.layers)
        count = gpus(spec.config.device)
        executor: StageExecutor
        if count:
            from gllm.runtime.cuda.start import OnGpu

            self._gpu = OnGpu(model, spec.config, *part, count)
            executor = self._gpu.executor
        else:
            share_measurements(spec.kernel_ratios)
            executor = StageExecutor(model, spec.config, *part)
        executor.load(Path(spec.folder), self._report_progress)
        self._executor = executor
        room = None
        if self._gpu is not None:
            # Before the memory left is divided: edges take some, NCCL's among it.
            self._edges = self._open_edges(self._gpu.reserve())
            room = self._gpu.room()
        return_memory()
        # What is loaded stays: the collector need never look at it.
        gc.freeze()
        gc.enable()
        loaded = StageLoaded(spec.stage, executor.weight_bytes, executor.block_bytes, room)
        self._loop.call_soon_threadsafe(self._frontend.send, loaded)

    def _report_progress(self, done: int, total: int) -> None:
        progress = LoadProgress(self.spec.stage, done, total)
        self._loop.call_soon_threadsafe(self._frontend.send, progress)

    def _handle(self, messages: list[AnyMessage]) -> None:
        try:
            for message in messages:
                self._handle_one(message)
            if self._driver is not None:
                self._driver.turn()
        except Exception as error:
            self._fail(error)

    def _handle_one(self, message: AnyMessage) -> None:
        match message:
            case RunStep(plan):
                self._stage.plan(plan)
                self._report_load_later()
            case RegisterSequences():
                self._stage.register(message)
            case InitializeCache(num_blocks):
                self._start(num_blocks)
            case StageConnected(stage):
                self._link(stage)
            case Profile(question, folder):
                self._profiler.turn(question, folder)
            case Shutdown():
                self.done.set()
            case _ if self._driver is not None:
                self._drive(self._driver, message)
            case _:
                raise ValueError(f"stage {self.spec.stage} has no use for {type(message).__name__}")

    def _drive(self, driver: Driver, message: AnyMessage) -> None:
        match message:
            case SubmitRequest():
                driver.submit(message)
            case RejectedRequest():
                driver.reject(message)
            case AbortSequences():
                driver.abort(message)
            case ResetPrefixCache():
                driver.forget_prefixes(message)
            case StepDone():
                driver.commit(message)
            case GrammarReady():
                driver.begin(message)
            case StageTimes():
                driver.observe(message)
            case _:
                raise ValueError(f"the driver has no use for {type(message).__name__}")

    def _start(self, num_blocks: int) -> None:
        """All stages are loaded: make the cache, open the edges, begin to work."""
        spec, executor = self.spec, self._executor
        assert spec.config.max_model_len is not None
        scheduler = spec.config.scheduler.resolve(
            spec.stages, num_blocks, spec.config.max_model_len
        )
        if self._gpu is not None:
            self._gpu.queues.bind_thread()
        executor.allocate(num_blocks, scheduler.block_size)
        on_thread: tuple[Any, ...] = ()
        if self._gpu is None:
            self._edges = self._open_edges(scheduler)
        else:
            self._gpu.record_graphs()
            on_thread = self._gpu.executor.finish, self._gpu.queues.bind_thread
        self._stage = Stage(executor, *self._edges, self._deliver, self._fail, *on_thread)
        if spec.stage == 0:
            others = list(self._stages.values())
            self._driver = Driver(
                self._scheduler(scheduler),
                self._to_own_stage,
                [*others],
                self._frontend,
                last_needs_prompts=self._gpu is not None,
                vocab_size=executor.model.vocab_size,
            )
        if spec.stage == 0:
            self._link(0)
        else:
            self._stages[0].send(StageConnected(spec.stage))
            self._frontend.send(StageReady(spec.stage))

    def _open_edges(self, scheduler: SchedulerConfig) -> tuple[Receiver | None, Sender | None]:
        """Open the edges to the neighbours for steps of this resolved configuration. On a GPU this
        waits for those."""
        assert scheduler.max_in_flight is not None
        assert scheduler.max_num_batched_tokens is not None
        spec, executor = self.spec, self._executor
        shape = EdgeShape(
            scheduler.max_in_flight,
            scheduler.max_num_batched_tokens,
            executor.model.hidden_size,
            executor.dtype.itemsize,
        )
        transport, device = "shared-memory", None
        if self._gpu is not None:
            transport = self._gpu.transport
            device = self._gpu.queues, self._gpu.executor.stream
        ends = spec.incoming, spec.outgoing
        return open_edges(*ends, transport, shape, executor.dtype, device, self._on_edge_fault)

    def _link(self, stage: int) -> None:
        """The driver is ready when every stage has reached it: once all are ready the sockets'
        names go, and who has not connected by then never will."""
        self._linked.add(stage)
        if len(self._linked) == self.spec.stages:
            self._frontend.send(StageReady(0))

    def _scheduler(self, config: SchedulerConfig) -> Scheduler:
        """The pipeline's scheduler, one that writes all down where a step log is asked for."""
        engine = self.spec.config
        if engine.step_log is None:
            return Scheduler(config)
        self._log = StepLogWriter(engine.step_log)
        now = time.monotonic()
        self._log.write(
            LogStart(now, engine.model, self.spec.layer_counts, config, "driver", warm_ups=1)
        )
        return LoggedScheduler(config, self._log.write, time.monotonic)

    def _to_own_stage(self, message: RegisterSequences | RunStep) -> None:
        """What the driver sends to the stage of its own process."""
        self._handle_one(message)

    def _deliver(self, result: StepDone | GrammarReady) -> None:
        """What this process has to say as the last stage."""
        if self.done.is_set():
            return  # The links are closed; nobody waits for what was still on its way.
        if self._driver is None:
            self._stages[0].send(result)
        else:
            self._handle([result])

    def _report_load_later(self) -> None:
        """Tell what was computed, twice a second while there is something to do."""
        if not self._reporting:
            self._reporting = True
            self._loop.call_later(LOAD_REPORT_SECONDS, self._report_load)

    def _report_load(self) -> None:
        """What this stage computed: totals to the frontend, times to the driver."""
        self._reporting = False
        if self.done.is_set():
            return
        stage = self._stage
        gpu = self._gpu
        device = (0.0, 0) if gpu is None else (gpu.executor.host_seconds, gpu.compilations)
        self._frontend.send(
            StageUtilization(self.spec.stage, stage.steps, stage.busy_seconds, *device)
        )
        times = StageTimes(self.spec.stage, *stage.take_times())
        if self._driver is None:
            self._stages[0].send(times)
        else:
            self._handle([times])
        if self._log is not None:
            self._log.flush()
        if stage.is_busy or times.steps:
            # Once more when all is done, so that bubbles are known up to there.
            self._report_load_later()

    def _on_edge_fault(self, error: BaseException) -> None:
        """An edge is broken; called on its own thread."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        """Say why, and end."""
        if not isinstance(error, ModelError | FieldError):
            log.error("the stage failed", exc_info=error)
        self._frontend.send(StageFailed(self.spec.stage, describe(error)))
        self.failed = True
        self.done.set()


async def in_own_thread(function: Callable[[], None]) -> None:
    """Run a function on a thread that ends with it.

    OpenMP gives every thread that forks helpers of its own, and keeps them as long as the thread
    lives; with more of them than cores it does not wait actively at barriers, and the compute
    thread's steps take a tenth longer.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            end = partial(done.set_exception, error)
        else:
            end = partial(done.set_result, None)
        # Nobody may wait any more.
        loop.call_soon_threadsafe(lambda: done.cancelled() or end())

    threading.Thread(target=run, name=function.__name__, daemon=True).start()
    await done


async def serve(spec: WorkerSpec) -> bool:
    """Work until told to end; whether all went well."""
    worker = Worker(spec)
    await worker.run()
    return not worker.failed


def work(stage: int, told: bytes) -> None:
    """Be the worker of this stage that the parent's line describes; nothing without a line, for the
    parent has ended. Does not return."""
    if not told:
        os._exit(1)
    setproctitle.setproctitle(f"gllm-stage-{stage}")
    spec = msgspec.json.decode(told, type=WorkerSpec)
    configure_logging(spec.logs, stage)
    well = uvloop.run(serve(spec))
    # Threads that wait for steps are daemons; nothing is left to clean up.
    os._exit(0 if well else 1)
