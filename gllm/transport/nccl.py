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
from typing import Any, ClassVar, Protocol, cast

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
    """Interface of a process group of two ranks, as torch.distributed.ProcessGroup."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> TransferHandle:
        """Send one tensor after the work in the current stream."""

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> TransferHandle:
        """Receive one tensor."""


GroupFactory = Callable[[Store, int], ProcessGroup]
"""Creates the process group of a rank, which meets its peer at the store."""


def create_nccl_group(store: Store, rank: int) -> ProcessGroup:
    """Create the NCCL communicator between the GPUs of two stages, after both have arrived.

    Torch's own handling of timeouts and errors, which ends the process, is off: TransferMonitor
    aborts failed transfers.

    Args:
        store: rendezvous store of the two ranks.
        rank: SENDER_RANK or RECEIVER_RANK.
    """
    wait_for_peer(store, rank)
    return cast(ProcessGroup, create_communicator(store, rank, 2))


def create_communicator(store: Store, rank: int, size: int) -> Any:
    """Create a torch NCCL process group, which connects when the first collective runs."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=365)
    return distributed.ProcessGroupNCCL(store, rank, size, options)


def join_group(descriptors: list[int], rank: int, create_group: GroupFactory) -> ProcessGroup:
    """Create the process group of two stages, with a store in a shared file or in copied logs.

    Args:
        descriptors: file descriptors of the `Edge`.
        rank: SENDER_RANK or RECEIVER_RANK.
        create_group: creates the process group from a store and a rank.
    """
    if len(descriptors) > LOCAL_DESCRIPTORS:
        # The other end is on another machine.
        return create_group(open_log_store(descriptors), rank)
    return create_group(rendezvous_store(descriptors[2], 2), rank)


def rendezvous_store(descriptor: int, size: int) -> Store:
    """Return a torch FileStore for `size` ranks in an anonymous file that all of them have open."""
    # A duplicate for the store, which opens the file by this path until the process ends.
    return FileStore(f"/proc/{os.getpid()}/fd/{os.dup(descriptor)}", size)


def wait_for_peer(store: Store, rank: int) -> None:
    """Sleep until the other of two ranks has arrived at the store; NCCL would poll busily."""
    store.set(f"rank {rank} is there", "")
    wait_until(lambda: store.check([f"rank {1 - rank} is there"]))


def wait_until(
    done: Callable[[], bool],
    timeout: float = math.inf,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Poll `done` with growing sleeps until it is true; return False after `timeout` seconds."""
    pause, end = MIN_PAUSE_SECONDS, time.monotonic() + timeout
    while not done():
        if time.monotonic() > end:
            return False
        sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_SECONDS)
    return True


class _NcclEnd(SlotRing):
    """Common part of both ends: slots on the device, transfer stream, process group, monitor."""

    rank: ClassVar[int]
    """Rank of this end in the process group: SENDER_RANK or RECEIVER_RANK."""

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
        """Join the process group and complete a first transfer.

        Args:
            descriptors: file descriptors of the edge.
            shape: capacity of the edge.
            dtype: dtype of activations.
            device: device of the stage.
            stream: compute stream of the stage.
            on_error: called when transfers are aborted.
            create_group: creates the process group.
            in_background: True if a thread monitors the transfers.

        Raises:
            TransportError: the first transfer does not end in time.
        """
        super().__init__(descriptors, shape, dtype)
        self._device, self._stream = device, stream
        self._group = join_group(descriptors, self.rank, create_group)
        self._transfers: DeviceStream = device.stream()
        self.monitor = TransferMonitor(self._group, TIMEOUT_SECONDS, on_error, device.bind_thread)
        """Monitor of the transfers of this end."""
        self._hidden = device.zeros((shape.slots, shape.max_tokens, shape.hidden_size), dtype)
        self._ready = [device.event() for _ in range(shape.slots)]
        self._done = [device.event() for _ in range(shape.slots)]
        # The first transfer initializes the communicator; the host waits for the peer meanwhile.
        first = device.event()
        with self._transfers.current():
            self._transfer(self._hidden[0, :1, :1]).wait()
        self._transfers.record(first)
        if not wait_until(first.query, TIMEOUT_SECONDS):
            self.monitor.abort(f"the first transfer did not end in {TIMEOUT_SECONDS:g} s")
        self.monitor.check()
        if in_background:
            self.monitor.start()

    def check(self) -> None:
        """Raise TransportError if transfers have been aborted."""
        self.monitor.check()

    def close(self) -> None:
        """Free this end, its threads included; no other method runs at the same time or later."""
        self.monitor.stop()
        if not self.monitor.abort_reason:
            self._group.abort()
        super().close()

    def _transfer(self, tensor: Tensor) -> TransferHandle:
        """Send or receive a tensor after the work in the current stream."""
        transfer = self._group.send if self.rank == SENDER_RANK else self._group.recv
        return transfer([tensor], 1 - self.rank, 0)

    def _queue_transfer(self, step: int, buffer: Tensor) -> None:
        """Queue a step's transfer in the transfer stream, and monitor it."""
        with self._transfers.current():
            handle = self._transfer(buffer)
        ended = self._device.event()
        with self._transfers.current():
            handle.wait()
        self._transfers.record(ended)
        self.monitor.add(step, handle, ended, time.monotonic())

    def _slot(self, step: int, tokens: int) -> tuple[Tensor, DeviceEvent, DeviceEvent]:
        """Return a step's buffer [tokens, hidden_size] and its events: ready, and done."""
        index = self.slot(step)
        return self._hidden[index, :tokens], self._ready[index], self._done[index]


class NcclSender(_NcclEnd):
    """Sends activations to the GPU of the next stage by NCCL; implements Sender."""

    rank = SENDER_RANK

    def mark_begin(self, step: int) -> None:
        """Do nothing: no data mover sends the step."""

    def send(self, step: int, hidden: Tensor) -> None:
        """Announce [tokens, hidden_size] and send a copy of it. Raises TransportError."""
        self.monitor.check()
        buffer, filled, sent = self._slot(step, len(hidden))
        # The slot's previous step may have failed on another stage and still be in flight.
        self._stream.wait(sent)
        with self._stream.current():
            buffer.copy_(hidden)
        self._stream.record(filled)
        self._transfers.wait(filled)
        # Before the transfer, for which the host waits in some process groups.
        self.signal(step, len(hidden), has_payload=False)
        self._queue_transfer(step, buffer)
        self._transfers.record(sent)

    def fail(self, step: int, error: str) -> None:
        """Announce an error in place of the activations."""
        self.signal(step, 0, error)


class NcclReceiver(_NcclEnd):
    """Receives activations from the GPU of the previous stage by NCCL; implements Receiver."""

    rank = RECEIVER_RANK
    _last: DeviceEvent | None = None
    """Event of the slot received last, to be recorded after the work that reads it."""

    def receive(self, step: int, tokens: int) -> Tensor:
        """Return the step's [tokens, hidden_size] on the device once it is announced.

        The stage's stream waits for the data. Raises StepFailedError, TransportError.
        """
        self.wait(step, tokens)
        self.monitor.check()
        if self._last is not None:
            self._stream.record(self._last)
        buffer, arrived, read = self._slot(step, tokens)
        self._transfers.wait(read)
        self._queue_transfer(step, buffer)
        self._transfers.record(arrived)
        self._stream.wait(arrived)
        self._last = read
        return buffer
