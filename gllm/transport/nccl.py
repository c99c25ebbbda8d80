"""Activations from GPU to GPU by NCCL, point to point.

Each edge has a communicator of two ranks and buffers on both sides.

Every step is first announced through the host, by the header of a shared-memory slot
(shared_memory.py) whose payload stays unused. The receiver posts an NCCL receive only for data that
has been sent, and a failed step is an error in its header without an NCCL call. A rank therefore
never waits for a peer that has nothing to send. A transfer that fails, or does not end in time
because a process is gone or a link is down, is aborted: the streams continue, the stage is notified
at once, and the next call raises TransportError with the cause.
"""

import math
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import FileStore, Store

from gllm.transport.base import EdgeLayout, OnTransportError
from gllm.transport.device_streams import DeviceEvent, DeviceRuntime, DeviceStream
from gllm.transport.edge import LOCAL_DESCRIPTORS
from gllm.transport.log_store import open_log_store
from gllm.transport.shared_memory import SlotRing
from gllm.transport.transfer_monitor import Abortable, TransferHandle, TransferMonitor

TIMEOUT_SECONDS = 60.0
"""Limit for a transfer once it is announced; the previous stage may still be computing a step."""
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.0005, 0.05
"""First and largest sleep of a host that waits; the sleep doubles each time."""
SENDER_RANK, RECEIVER_RANK = 0, 1
"""Ranks of the two ends in their process group."""


class ProcessGroup(Abortable, Protocol):
    """Process group of two ranks: torch.distributed.ProcessGroup."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> TransferHandle:
        """Send one tensor after the work in the current stream."""

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> TransferHandle:
        """Receive one tensor."""


GroupFactory = Callable[[Store, int], ProcessGroup]
"""Creates the process group of a rank, which meets its peer at the store."""


def create_nccl_group(store: Store, rank: int) -> ProcessGroup:
    """Create an NCCL communicator of two GPUs.

    TransferMonitor handles timeouts and errors; torch's own handling would end the process.
    """
    wait_for_peer(store, rank)
    return cast(ProcessGroup, create_communicator(store, rank, 2))


def create_communicator(store: Store, rank: int, size: int) -> Any:
    """Create torch's process group of NCCL, which connects with its first collective."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=365)
    return distributed.ProcessGroupNCCL(store, rank, size, options)


def join_group(descriptors: list[int], rank: int, create_group: GroupFactory) -> ProcessGroup:
    """Create the process group of an edge; both ends use a shared file as the store."""
    if len(descriptors) > LOCAL_DESCRIPTORS:
        # The other end is on another machine.
        return create_group(open_log_store(descriptors), rank)
    # A duplicate for the store, which opens the file by this path until the process ends.
    path = f"/proc/{os.getpid()}/fd/{os.dup(descriptors[2])}"
    return create_group(FileStore(path, 2), rank)


def wait_for_peer(store: Store, rank: int) -> None:
    """Sleep until both ends have arrived; NCCL would keep a core busy meanwhile."""
    store.set(f"rank {rank} is there", "")
    wait_until(lambda: store.check([f"rank {1 - rank} is there"]))


def wait_until(
    done: Callable[[], bool],
    timeout: float = math.inf,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Sleep with growing pauses until `done()` is true; return False after `timeout` seconds."""
    pause, end = MIN_PAUSE_SECONDS, time.monotonic() + timeout
    while not done():
        if time.monotonic() > end:
            return False
        sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_SECONDS)
    return True


class _NcclEndpoint:
    """Common part of both ends: slots on the device, transfer stream, process group, monitor."""

    def __init__(
        self,
        descriptors: list[int],
        shape: EdgeLayout,
        dtype: torch.dtype,
        device: DeviceRuntime,
        rank: int,
        create_group: GroupFactory,
        on_error: OnTransportError,
        in_background: bool,
    ) -> None:
        """Join the process group and complete a first transfer.

        Args:
            descriptors: of the edge.
            shape: capacity of the edge.
            dtype: of activations.
            device: device of the stage.
            rank: SENDER_RANK or RECEIVER_RANK.
            create_group: creates the process group.
            on_error: called when transfers are aborted.
            in_background: whether a thread monitors the transfers.

        Raises:
            TransportError: the first transfer does not end in time.
        """
        self._device = device
        self.ring = SlotRing(descriptors, shape, dtype)
        self.group = join_group(descriptors, rank, create_group)
        self.transfers: DeviceStream = device.stream()
        self.monitor = TransferMonitor(self.group, TIMEOUT_SECONDS, on_error, device.bind_thread)
        self._hidden = device.zeros((shape.slots, shape.max_tokens, shape.hidden_size), dtype)
        self._ready = [device.event() for _ in range(shape.slots)]
        self._done = [device.event() for _ in range(shape.slots)]
        # The first transfer initializes the communicator; the host waits for the peer meanwhile.
        first = device.event()
        with self.transfers.current():
            transfer = self.group.send if rank == SENDER_RANK else self.group.recv
            transfer([self._hidden[0, :1, :1]], 1 - rank, 0).wait()
        self.transfers.record(first)
        if not wait_until(first.query, TIMEOUT_SECONDS):
            self.monitor.abort(f"the first transfer did not end in {TIMEOUT_SECONDS:g} s")
        self.monitor.check()
        if in_background:
            self.monitor.start()

    def track(self, step: int, handle: TransferHandle) -> None:
        """Make the transfer stream wait for a step's transfer, and monitor it."""
        ended = self._device.event()
        with self.transfers.current():
            handle.wait()
        self.transfers.record(ended)
        self.monitor.add(step, handle, ended, time.monotonic())

    def close(self) -> None:
        """End the monitor and all transfers, and unmap the ring."""
        self.monitor.stop()
        if not self.monitor.abort_reason:
            self.group.abort()
        self.ring.close()

    def slot(self, step: int, tokens: int) -> tuple[Tensor, DeviceEvent, DeviceEvent]:
        """Return a step's buffer [tokens, hidden_size] and its events: ready, and done."""
        index = step % len(self._ready)
        return self._hidden[index, :tokens], self._ready[index], self._done[index]


class NcclSender:
    """Sending end of an NCCL edge."""

    def __init__(
        self,
        descriptors: list[int],
        shape: EdgeLayout,
        dtype: torch.dtype,
        device: DeviceRuntime,
        stream: DeviceStream,
        on_error: OnTransportError = lambda error: None,
        create_group: GroupFactory = create_nccl_group,
        in_background: bool = True,
    ) -> None:
        """Open this end; see _NcclEndpoint."""
        common = (descriptors, shape, dtype, device)
        self._end = _NcclEndpoint(*common, SENDER_RANK, create_group, on_error, in_background)
        self.monitor = self._end.monitor
        """Monitor of the transfers of this end."""
        self._stream = stream

    def mark_begin(self, step: int) -> None:
        """Do nothing: no data mover sends the step."""

    def send(self, step: int, hidden: Tensor) -> None:
        """Announce [tokens, hidden_size] and send a copy of it. Raises TransportError."""
        end = self._end
        end.monitor.check()
        buffer, filled, sent = end.slot(step, len(hidden))
        # The slot's previous step may have failed on another stage and still be in flight.
        self._stream.wait(sent)
        with self._stream.current():
            buffer.copy_(hidden)
        self._stream.record(filled)
        end.transfers.wait(filled)
        # Before the transfer, for which the host waits in some process groups.
        end.ring.signal(step, len(hidden), has_payload=False)
        with end.transfers.current():
            work = end.group.send([buffer], RECEIVER_RANK, 0)
        end.track(step, work)
        end.transfers.record(sent)

    def fail(self, step: int, error: str) -> None:
        """Announce an error in place of the activations."""
        self._end.ring.signal(step, 0, error)

    def close(self) -> None:
        """Free this end, its threads included; no other method runs at the same time or later."""
        self._end.close()


class NcclReceiver:
    """Receiving end of an NCCL edge."""

    def __init__(
        self,
        descriptors: list[int],
        shape: EdgeLayout,
        dtype: torch.dtype,
        device: DeviceRuntime,
        stream: DeviceStream,
        on_error: OnTransportError = lambda error: None,
        create_group: GroupFactory = create_nccl_group,
        in_background: bool = True,
    ) -> None:
        """Open this end; see _NcclEndpoint."""
        common = (descriptors, shape, dtype, device)
        self._end = _NcclEndpoint(*common, RECEIVER_RANK, create_group, on_error, in_background)
        self.monitor = self._end.monitor
        """Monitor of the transfers of this end."""
        self._stream = stream
        self._last: DeviceEvent | None = None
        """Event of the slot received last, to be recorded after the work that reads it."""

    @property
    def event(self) -> int:
        """Descriptor of an event that is readable once the next step has arrived."""
        return self._end.ring.event

    def has_arrived(self, step: int) -> bool:
        """Return True if `receive` of the next step does not wait."""
        return self._end.ring.has_arrived(step)

    def receive(self, step: int, tokens: int) -> Tensor:
        """Return the step's [tokens, hidden_size] on the device once it is announced.

        The stage's stream waits for the data. Raises StepFailedError, TransportError.
        """
        end = self._end
        end.ring.wait(step, tokens)
        end.monitor.check()
        if self._last is not None:
            self._stream.record(self._last)
        buffer, arrived, read = end.slot(step, tokens)
        end.transfers.wait(read)
        with end.transfers.current():
            work = end.group.recv([buffer], SENDER_RANK, 0)
        end.track(step, work)
        end.transfers.record(arrived)
        self._stream.wait(arrived)
        self._last = read
        return buffer

    def check(self) -> None:
        """Raise TransportError if transfers have been aborted."""
        self._end.monitor.check()

    def cancel(self) -> None:
        """End a waiting `receive` and all later ones with EdgeClosedError; called on any thread."""
        self._end.ring.cancel()

    def close(self) -> None:
        """Free this end, its threads included; no other method runs at the same time or later."""
        self._end.close()
