"""Worker process: its connections to the parent, heartbeats, and one stage instance at a time.

`gllm.runtime.worker.__main__` starts it. The parent assigns a stage for each epoch; between
two epochs the process keeps the weights.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import setproctitle
import uvloop
import zmq
from msgspec.structs import replace

from gllm.messages import lifecycle
from gllm.messages.codec import AnyMessage, decode_for_worker
from gllm.models.errors import ModelError
from gllm.observability.logs import configure_logging
from gllm.options.field_types import FieldError
from gllm.recovery.liveness import CHECK_SECONDS
from gllm.recovery.placement import RankName
from gllm.runtime.head.assignment import (
    KvMoverConnection,
    StageAssignment,
    WorkerIdentity,
    decode_parent_message,
)
from gllm.runtime.messaging.bus import Spoke
from gllm.runtime.messaging.session import SessionError
from gllm.runtime.worker.executor import WeightMemoryError
from gllm.runtime.worker.probe import ProbeCancelledError, StageProbe
from gllm.runtime.worker.stage import format_error
from gllm.runtime.worker.stage_instance import StageInstance, run_in_thread
from gllm.runtime.worker.stage_resources import NICENESS, StageLoader
from gllm.transport.descriptors import DescriptorChannel, DescriptorError

if TYPE_CHECKING:
    from torch.profiler import profile

log = logging.getLogger(__name__)


def prepare_layers(
    assignment: StageAssignment,
    earlier: Sequence[StageLoader],
    running: StageLoader | None,
    head: Spoke,
) -> StageLoader:
    """Load layers for a later stage on a thread, then send LayersPrepared to the head.

    A failure does not end the worker. Layers that do not fit into memory now are loaded when the
    stage begins; another error is reported, so that the change is not made.

    Args:
        assignment: stage to load, with the number of the change.
        earlier: loaders of layers for other stages, which are taken over or freed.
        running: loader of the present stage, whose layers are shared; None without one.
        head: session with the head process.
    """
    loop = asyncio.get_running_loop()
    num_bytes = 0

    def on_progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal num_bytes
        is_beside_steps = running is not None or assignment.replaceable
        if is_beside_steps and not done_bytes:
            # Of this thread alone, which computes nothing.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        num_bytes = done_bytes

    def report(cause: str, is_failed: bool = False) -> None:
        read_bytes = 0 if cause else num_bytes
        message = lifecycle.LayersPrepared(assignment.change, read_bytes, cause, is_failed)
        with suppress(RuntimeError):  # The loop has been closed.
            loop.call_soon_threadsafe(head.send, message)

    def on_error(error: BaseException) -> None:
        if isinstance(error, WeightMemoryError):
            log.warning("the layers of the next epoch are loaded later: %s", error)
            report(str(error))
        else:
            log.error("the layers of the next epoch cannot be loaded", exc_info=error)
            report(format_error(error), is_failed=True)

    loader = StageLoader(assignment, on_progress, earlier, running)
    on_loaded: Callable[[], None] = lambda: report("")  # noqa: E731
    loader.start(on_loaded, on_error)
    return loader


class TorchProfiler:
    """Runs torch.profiler in a worker on command, and reports the result of each command."""

    def __init__(self, place: RankName, frontend: Spoke) -> None:
        self._place = place
        self._frontend = frontend
        self._profile: profile | None = None
        self._folder = ""
        self._last_command: asyncio.Task[None] | None = None

    def handle(self, command: lifecycle.StartProfile | lifecycle.StopProfile) -> None:
        """Run a command after the previous ones; report its end to the frontend."""
        loop = asyncio.get_running_loop()
        self._last_command = loop.create_task(self._run(command, self._last_command))

    async def _run(
        self,
        command: lifecycle.StartProfile | lifecycle.StopProfile,
        previous: "asyncio.Task[None] | None",
    ) -> None:
        if previous is not None:
            await previous
        error = ""
        try:
            if isinstance(command, lifecycle.StartProfile):
                await asyncio.to_thread(self._start, command.folder)
            else:
                await asyncio.to_thread(self._stop)
        except Exception as failure:
            log.exception("the profile failed")
            error = f"{type(failure).__name__}: {failure}"
        self._frontend.send(lifecycle.CommandDone(command.command_id, self._place.stage, error))

    def _start(self, folder: str) -> None:
        """Start recording; the file goes to `folder`."""
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import profile

        if self._profile is not None:
            raise RuntimeError("a profile is being recorded")
        Path(folder).mkdir(parents=True, exist_ok=True)
        # Without this option only the thread that starts the profile is recorded.
        recording = profile(experimental_config=_ExperimentalConfig(profile_all_threads=True))
        recording.start()
        self._profile, self._folder = recording, folder

    def _stop(self) -> None:
        """Stop recording and write the file."""
        recording, self._profile = self._profile, None
        if recording is None:
            raise RuntimeError("no profile is being recorded")
        recording.stop()
        timestamp = time.strftime("%Y%m%d-%H%M%S")
        path = Path(self._folder, f"stage-{self._place.label}-{timestamp}.json")
        recording.export_chrome_trace(str(path))
        log.info("profile written to %s", path)


class Worker:
    """Event loop of a worker process: runs one stage at a time as the head process assigns them."""

    def __init__(
        self, identity: WorkerIdentity, on_assigned: Callable[[RankName], None] = lambda _: None
    ) -> None:
        """Connect to the parent.

        Args:
            identity: identity of the worker.
            on_assigned: called with the place of each assignment.
        """
        self.done = asyncio.Event()
        """Set when the process has to end."""
        self.has_failed = False
        self.instance: StageInstance | None = None
        """Instance of the current epoch, or the closed one of the last epoch."""
        self._identity = identity
        self._on_assigned = on_assigned
        self._place = RankName(0)
        """Place of the last assignment."""
        self._is_assigned = False
        """True if `instance` is not closed."""
        self._closing: asyncio.Task[None] | None = None
        self._prepared: list[StageLoader] = []
        """Layers for the next instance, beside those of the last one: of a planned change, or of
        all stages of which a standby worker will get one."""
        self._probe: StageProbe | None = None
        """Measurement under way."""
        self._probing: asyncio.Task[None] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._head = Spoke(
            self._context, identity.run, identity.sender, identity.hub_address, decode_for_worker
        )
        self._profiler: TorchProfiler | None = None

    async def run(self) -> None:
        """Handle messages until the parent's Shutdown or an error."""
        self._head.start(
            self._handle, lambda cause: self.fail(SessionError(f"the parent was lost: {cause}"))
        )
        heartbeats = asyncio.create_task(self._send_heartbeats())
        await self.done.wait()
        heartbeats.cancel()
        self.disconnect()

    def disconnect(self) -> None:
        """End all sessions, after the messages that are queued."""
        if self.instance is not None:
            self.instance.disconnect()
        self._head.close()
        self._context.term()

    def assign(self, assignment: StageAssignment) -> None:
        """Begin an epoch with a new stage instance, or measure this worker's speed.

        assignment: its descriptors belong to the instance.
        """
        if assignment.replaceable:
            stages = [replace(assignment, sender=sender) for sender in assignment.replaceable]
            self._prepared = [prepare_layers(stage, [], None, self._head) for stage in stages]
            return
        if assignment.change:
            running = None if self.instance is None else self.instance.loader
            self._prepared = [prepare_layers(assignment, self._prepared, running, self._head)]
            return
        if self._is_assigned or self._closing is not None or self._probing is not None:
            self.fail(RuntimeError("a stage was assigned before the last one was closed"))
            return
        self._place = assignment.name
        self._on_assigned(self._place)
        if assignment.is_probe:
            self._probe = StageProbe(assignment)
            self._probing = asyncio.create_task(self._measure(self._probe))
            return
        self._is_assigned = True
        self._head.advance(assignment.placement.epoch)
        self._profiler = self._profiler or TorchProfiler(self._place, self._head)
        self.instance = StageInstance(
            assignment,
            self._context,
            self._identity.run,
            self._head,
            self.fail,
            self.instance,
            self._prepared,
        )
        self._prepared = []
        self.instance.load()

    def connect_kv_mover(self, connection: KvMoverConnection) -> None:
        """Connect the driver to the process that transfers KV blocks, over a channel."""
        channel = DescriptorChannel.from_descriptor(connection.descriptor)
        instance = self.instance if self._is_assigned else None
        if instance and instance.assignment.placement.epoch == connection.epoch:
            instance.connect_kv_mover(channel)
        else:
            channel.close()

    async def _measure(self, probe: StageProbe) -> None:
        """Measure on a thread and report StageMeasured."""
        try:
            await run_in_thread(probe.run)
        except ProbeCancelledError:
            return
        except Exception as error:
            self.fail(error)
            return
        finally:
            self._probe = self._probing = None
        if not self.done.is_set():
            self._head.send(probe.result)

    def fail(self, error: BaseException) -> None:
        """Report an error to the parent and end the process."""
        if self.done.is_set():
            return
        if not isinstance(error, ModelError | FieldError):
            log.error("the stage failed", exc_info=error)
        self._head.send(lifecycle.StageFailed(self._place.stage, format_error(error)))
        self.has_failed = True
        self.done.set()

    def _handle(self, messages: list[AnyMessage]) -> None:
        """Handle messages of the parent; those about steps are handled together."""
        for_instance: list[AnyMessage] = []
        try:
            for message in messages:
                match message:
                    case lifecycle.CloseEpoch():
                        self._close_instance()
                    case lifecycle.StartProfile() | lifecycle.StopProfile() if (
                        self._profiler is not None
                    ):
                        self._profiler.handle(message)
                    case lifecycle.Shutdown():
                        self.done.set()
                    case _:
                        for_instance.append(message)
        except Exception as error:
            self.fail(error)
        if for_instance and self.instance is not None and self._is_assigned:
            self.instance.handle(for_instance)

    def _close_instance(self) -> None:
        """Close the instance, without blocking the event loop, and report EpochClosed."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
            self._closing.add_done_callback(self._on_closed)

    async def _close(self) -> None:
        if self._probe is not None and self._probing is not None:
            self._probe.cancel()
            await self._probing
        if self.instance is not None and self._is_assigned:
            self._is_assigned = False
            await self.instance.close()

    def _on_closed(self, closing: "asyncio.Task[None]") -> None:
        self._closing = None
        if closing.cancelled() or self.done.is_set():
            return
        if (error := closing.exception()) is not None:
            self.fail(error)
        else:
            self._head.send(lifecycle.EpochClosed())

    async def _send_heartbeats(self) -> None:
        while True:
            self._head.send(self._create_heartbeat())
            await asyncio.sleep(CHECK_SECONDS)

    def _create_heartbeat(self) -> lifecycle.Heartbeat:
        instance = self.instance if self._is_assigned else None
        runner = None if instance is None else instance.runner
        if runner is None or (step := runner.step_under_way) is None:
            return lifecycle.Heartbeat(-1, 0.0, 0, time.process_time())
        plan, begin = step
        return lifecycle.Heartbeat(
            plan.step,
            time.monotonic() - begin,
            sum(row.num_tokens for row in plan.rows),
            time.process_time(),
            runner.is_waiting,
        )


async def serve(
    identity: WorkerIdentity, channel: DescriptorChannel, on_assigned: Callable[[RankName], None]
) -> bool:
    """Run a worker until it is shut down; return False after a failure.

    Args:
        identity: number of the worker, the head's address and log options.
        channel: connection to the parent that sends stage assignments with file descriptors.
        on_assigned: called with the stage and rank of each assignment.
    """
    worker, loop = Worker(identity, on_assigned), asyncio.get_running_loop()

    def read() -> None:
        try:
            message = decode_parent_message(*channel.receive())
            if isinstance(message, WorkerIdentity):
                raise DescriptorError("a worker has one identity")
            if isinstance(message, KvMoverConnection):
                worker.connect_kv_mover(message)
            else:
                worker.assign(message)
        except Exception as error:
            loop.remove_reader(channel.fileno())
            worker.fail(error)

    loop.add_reader(channel.fileno(), read)
    await worker.run()
    return not worker.has_failed


def run_worker(descriptor: int, kernel_ratios: int) -> None:
    """Run a worker process; ends the process with status 0, or 1 after a failure.

    The status is also 1 if the parent exits before it has sent the worker's identity.

    Args:
        descriptor: this end of the channel to the parent.
        kernel_ratios: descriptor of the file in which workers share measurements of kernels.
    """
    # Imported while the parent prepares the assignment.
    from gllm.kernels.native.library import share_measurements

    share_measurements(kernel_ratios)
    channel = DescriptorChannel.from_descriptor(descriptor)
    try:
        identity = decode_parent_message(*channel.receive())
    except DescriptorError:
        os._exit(1)
    assert isinstance(identity, WorkerIdentity), "the first message is the identity"
    logs = identity.logs

    def on_assigned(place: RankName) -> None:
        setproctitle.setproctitle(f"gllm-stage-{place.label}")
        configure_logging(logs, str(place))

    is_success = uvloop.run(serve(identity, channel, on_assigned))
    # Threads that wait for steps are daemons; nothing is left to clean up.
    os._exit(0 if is_success else 1)
