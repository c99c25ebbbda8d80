"""Worker process: its connections to the parent, heartbeats, and one stage instance at a time.

`gllm.runtime.worker.__main__` starts it. The parent assigns a stage for each generation; between
two generations the process keeps the weights.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable

import setproctitle
import uvloop
import zmq

from gllm.messages.codec import AnyMessage, decode_for_worker
from gllm.messages.control import StartProfile, StopProfile
from gllm.messages.lifecycle import (
    CloseGeneration,
    GenerationClosed,
    Heartbeat,
    Shutdown,
    StageFailed,
)
from gllm.models.errors import ModelError
from gllm.observability.logs import configure_logging
from gllm.options.field_types import FieldError
from gllm.recovery.liveness import CHECK_SECONDS
from gllm.recovery.placement import PlaceName
from gllm.runtime.head.assignment import (
    KvMoverConnection,
    StageAssignment,
    WorkerIdentity,
    decode_parent_message,
)
from gllm.runtime.messaging.session import SessionError
from gllm.runtime.messaging.spoke import Spoke
from gllm.runtime.messaging.threads import run_in_thread
from gllm.runtime.worker.preparation import prepare_layers
from gllm.runtime.worker.probe import ProbeCancelledError, StageProbe
from gllm.runtime.worker.profiler import TorchProfiler
from gllm.runtime.worker.stage import format_error
from gllm.runtime.worker.stage_instance import StageInstance
from gllm.runtime.worker.stage_loader import StageLoader
from gllm.transport.descriptors import DescriptorChannel, DescriptorError

log = logging.getLogger(__name__)


class Worker:
    """Event loop side of a worker process."""

    def __init__(
        self, identity: WorkerIdentity, on_assigned: Callable[[PlaceName], None] = lambda _: None
    ) -> None:
        """Connect to the parent.

        Args:
            identity: of the worker.
            on_assigned: called with the place of each assignment.
        """
        self.done = asyncio.Event()
        """Set when the process has to end."""
        self.has_failed = False
        self.instance: StageInstance | None = None
        """Instance of the current generation, or the closed one of the last generation."""
        self._identity = identity
        self._on_assigned = on_assigned
        self._place = PlaceName(0)
        """Place of the last assignment."""
        self._is_assigned = False
        """True if `instance` is not closed."""
        self._closing: asyncio.Task[None] | None = None
        self._prepared: StageLoader | None = None
        """Layers for the next instance; None if it begins with those of the last one."""
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
        """Begin a generation with a new stage instance, or measure this worker's speed.

        assignment: its descriptors belong to the instance.
        """
        if assignment.change:
            self._prepare(assignment)
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
        self._head.advance(assignment.placement.generation)
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
        self._prepared = None
        self.instance.load()

    def connect_kv_mover(self, connection: KvMoverConnection) -> None:
        """Let the driver of a generation command the KV mover over a channel."""
        channel = DescriptorChannel.from_descriptor(connection.descriptor)
        instance = self.instance if self._is_assigned else None
        if instance and instance.assignment.placement.generation == connection.generation:
            instance.connect_kv_mover(channel)
        else:
            channel.close()

    def _prepare(self, assignment: StageAssignment) -> None:
        """Load the layers of a planned change on a thread, beside the present stage."""
        running = None if self.instance is None else self.instance.loader
        self._prepared = prepare_layers(assignment, self._prepared, running, self._head)

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
        """Report the error to the parent and end, unless this worker has ended."""
        if self.done.is_set():
            return
        if not isinstance(error, ModelError | FieldError):
            log.error("the stage failed", exc_info=error)
        self._head.send(StageFailed(self._place.stage, format_error(error)))
        self.has_failed = True
        self.done.set()

    def _handle(self, messages: list[AnyMessage]) -> None:
        """Handle messages of the parent; those about steps are handled together."""
        for_instance: list[AnyMessage] = []
        try:
            for message in messages:
                match message:
                    case CloseGeneration():
                        self._close_instance()
                    case StartProfile() | StopProfile() if self._profiler is not None:
                        self._profiler.handle(message)
                    case Shutdown():
                        self.done.set()
                    case _:
                        for_instance.append(message)
        except Exception as error:
            self.fail(error)
        if for_instance and self.instance is not None and self._is_assigned:
            self.instance.handle(for_instance)

    def _close_instance(self) -> None:
        """Close the instance, without blocking the event loop, and report GenerationClosed."""
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
            self._head.send(GenerationClosed())

    async def _send_heartbeats(self) -> None:
        while True:
            self._head.send(self._create_heartbeat())
            await asyncio.sleep(CHECK_SECONDS)

    def _create_heartbeat(self) -> Heartbeat:
        instance = self.instance if self._is_assigned else None
        step = None if instance is None else instance.step_under_way
        if instance is None or step is None:
            return Heartbeat(-1, 0.0, 0, time.process_time())
        plan, begin = step
        return Heartbeat(
            plan.step,
            time.monotonic() - begin,
            sum(row.num_tokens for row in plan.rows),
            time.process_time(),
            instance.is_waiting,
        )


class ParentChannel:
    """The messages of the parent that have descriptors, on the event loop."""

    def __init__(self, channel: DescriptorChannel, worker: Worker) -> None:
        """Deliver assignments to a worker, which fails when the parent has exited."""
        self._channel = channel
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(channel.fileno(), self._read)

    def _read(self) -> None:
        try:
            message = decode_parent_message(*self._channel.receive())
            if isinstance(message, WorkerIdentity):
                raise DescriptorError("a worker has one identity")
            if isinstance(message, KvMoverConnection):
                self._worker.connect_kv_mover(message)
            else:
                self._worker.assign(message)
        except Exception as error:
            self._loop.remove_reader(self._channel.fileno())
            self._worker.fail(error)


async def serve(
    identity: WorkerIdentity, channel: DescriptorChannel, on_assigned: Callable[[PlaceName], None]
) -> bool:
    """Run a worker until it is shut down; return True if it did not fail."""
    worker = Worker(identity, on_assigned)
    ParentChannel(channel, worker)
    await worker.run()
    return not worker.has_failed


def run_worker(descriptor: int, kernel_ratios: int) -> None:
    """Run a worker process; does not return.

    The process exits with 1 if the parent exits before it has sent an identity.

    Args:
        descriptor: of this end of the channel to the parent.
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

    def on_assigned(place: PlaceName) -> None:
        setproctitle.setproctitle(f"gllm-stage-{place.label}")
        configure_logging(logs, str(place))

    is_success = uvloop.run(serve(identity, channel, on_assigned))
    # Threads that wait for steps are daemons; nothing is left to clean up.
    os._exit(0 if is_success else 1)
