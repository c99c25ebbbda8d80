"""Sums, gathers and broadcasts of a stage's ranks by NCCL, each rank on a GPU of its own.

Collectives are ordered with the work of the compute stream and are captured in graphs like every
other operation. NCCL computes a sum once and distributes it, so all ranks hold the same bits; its
order of summation is not the order of ranks, and partial sums are added in their own dtype.

A collective waits for all ranks. Before they queue a step, ranks therefore agree on it through host
memory, and a step that does not end in time is aborted: the streams continue, the stage is notified
at once, and everything that follows ends with GroupClosedError.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import ReduceOp
from torch.nn import functional

from gllm.transport.base import OnTransportError, TransportError
from gllm.transport.device_group import CANCEL_SECONDS, DeviceRankGroup
from gllm.transport.device_streams import DeviceEvent, DeviceRuntime, DeviceStream
from gllm.transport.groups import StageGroups
from gllm.transport.nccl import (
    TIMEOUT_SECONDS,
    create_communicator,
    rendezvous_store,
    wait_until,
)
from gllm.transport.region import RegionLayout
from gllm.transport.shared_region import open_shared_groups
from gllm.transport.transfer_monitor import Abortable, TransferHandle, TransferMonitor

log = logging.getLogger(__name__)

RENDEZVOUS_STEP = 2**62
"""Number under which ranks agree to connect; steps of a scheduler are smaller."""
CLOSE_SECONDS = 5.0
"""Limit for NCCL to free a communicator; the process may end with it."""
ROOT = 0
"""Rank that samples: it receives logits and sends tokens."""


class Communicator(Abortable, Protocol):
    """Interface of the process group of a stage's ranks, as torch.distributed.ProcessGroupNCCL."""

    def allreduce(self, tensor: Tensor, op: ReduceOp.RedOpType) -> TransferHandle:
        """Reduce a tensor in place, after the work in the current stream."""

    def gather(self, outputs: list[Tensor], tensor: Tensor, root: int) -> TransferHandle:
        """Gather tensors of one shape on `root`; `outputs` is empty on the other ranks."""

    def broadcast(self, tensor: Tensor, root: int) -> TransferHandle:
        """Overwrite a tensor with that of `root`."""


CommunicatorFactory = Callable[[Store, int, int], Communicator]
"""Factory of a communicator, called with store, rank and number of ranks."""


class _QueuedStep:
    """All work of a step, as a transfer for a TransferMonitor."""

    def __init__(self, ended: DeviceEvent) -> None:
        self._ended = ended

    def is_completed(self) -> bool:
        """Return whether the transfer has ended, successfully or not."""
        return self._ended.query()

    def exception(self) -> BaseException | None:
        """Return None: errors are those of the device, which its next use reports."""
        return None

    def wait(self) -> bool:
        """Do nothing: the work is in the compute stream itself."""
        return True


class _BackgroundAbort:
    """Abort of a communicator, once, on a thread of its own.

    Collectives end at once, but NCCL does not return while graphs refer to the communicator
    (`commDestroySync` in NCCL's src/init.cc).
    """

    def __init__(self, communicator: Communicator) -> None:
        self._thread = threading.Thread(target=communicator.abort, name="nccl-abort", daemon=True)
        self._lock = threading.Lock()
        self._has_begun = False

    def abort(self) -> None:
        """Start the abort, unless it has been."""
        with self._lock:
            if not self._has_begun:
                self._has_begun = True
                self._thread.start()

    def wait(self) -> None:
        """Abort; wait until NCCL has freed the communicator, for a limited time."""
        self.abort()
        self._thread.join(CLOSE_SECONDS)


class NcclRankGroup(DeviceRankGroup):
    """Communicator of tensor parallel ranks with one GPU each; collectives run in NCCL."""

    can_capture = True

    def __init__(
        self,
        host: StageGroups,
        communicator: Communicator,
        device: DeviceRuntime,
        stream: DeviceStream,
        on_error: OnTransportError = lambda error: None,
        in_background: bool = True,
        cancel_seconds: float = CANCEL_SECONDS,
    ) -> None:
        """Create from a connected NCCL communicator.

        Args:
            host: communicators of the same ranks in host memory.
            communicator: NCCL communicator of this rank.
            device: device of this rank.
            stream: compute stream; every method is called within it.
            on_error: called when collectives are aborted because they do not end.
            in_background: True to monitor the steps on a thread.
            cancel_seconds: limit for launches in progress when the communicator is cancelled.
        """
        super().__init__(host, cancel_seconds)
        self._communicator, self._device, self._stream = communicator, device, stream
        self._aborting = _BackgroundAbort(communicator)
        self.monitor = TransferMonitor(
            self._aborting, TIMEOUT_SECONDS, self._on_timeout, device.bind_thread, "the collectives"
        )
        self._on_error = on_error
        if in_background:
            self.monitor.start()

    def sum(self, partial: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the sum of the ranks' parts, the same bits on all ranks; can be captured.

        `partial` is overwritten.
        """
        total = partial.contiguous()
        with self.launching():
            self._communicator.allreduce(total, ReduceOp.SUM).wait()
        if bias is not None:
            total = total.add_(bias)
        return total.to(dtype)

    def maximum(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum [rows] float32 of the ranks' values; can be captured."""
        result = values.clone()
        with self.launching():
            self._communicator.allreduce(result, ReduceOp.MAX).wait()
        return result

    def gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """Return the ranks' parts side by side, [rows, sum of sizes], on rank 0; elsewhere None."""
        # NCCL gathers parts of one size.
        width = max(sizes)
        if part.shape[1] < width:
            part = functional.pad(part, (0, width - part.shape[1]))
        part = part.contiguous()
        if self.rank != ROOT:
            with self.launching():
                self._communicator.gather([], part, ROOT).wait()
            return None
        parts = part.new_empty((self.size, *part.shape))
        with self.launching():
            self._communicator.gather(list(parts.unbind()), part, ROOT).wait()
        used = zip(parts.unbind(), sizes, strict=True)
        return torch.cat([block[:, :size] for block, size in used], dim=1)

    def broadcast(self, values: Tensor | None, count: int) -> Tensor:
        """Return rank 0's values [count] int64 on all ranks; values: ignored on other ranks."""
        if values is None:
            values = torch.empty(count, dtype=torch.int64, device=self._device.device)
        with self.launching():
            self._communicator.broadcast(values, ROOT).wait()
        return values

    def end_step(self, step: int) -> None:
        """Record that all work of a step is queued. Called on the compute thread.

        The work is aborted if it does not end in time.

        Raises:
            TransportError: the work of an earlier step did not end in time.
        """
        self.monitor.check()
        ended = self._device.event()
        self._stream.record(ended)
        self.monitor.add(step, _QueuedStep(ended), ended, time.monotonic())

    def close(self) -> None:
        """Free this rank's end; no other method but `cancel` runs at the same time or later.

        Graphs with collectives have been freed.
        """
        self.monitor.stop()
        self._aborting.wait()
        super().close()

    def _abort(self) -> None:
        self._aborting.abort()

    def _on_timeout(self, error: BaseException) -> None:
        """Report an error of the monitor, and end what the other ranks wait for."""
        self._on_error(error)
        self.cancel()


def connect(
    store: Store,
    rank: int,
    size: int,
    device: DeviceRuntime,
    stream: DeviceStream,
    create: CommunicatorFactory = create_communicator,
    timeout: float = TIMEOUT_SECONDS,
) -> Communicator:
    """Create the NCCL communicator of a tensor parallel rank and run a first all-reduce with it.

    Args:
        store: rendezvous store of the ranks.
        rank: number of this rank, from 0.
        size: number of ranks.
        device: device of this rank.
        stream: compute stream of this rank.
        create: creates the communicator.
        timeout: limit in seconds.

    Raises:
        TransportError: not all ranks have connected in time; the message names the missing ones.
    """
    connected: list[Communicator] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            device.bind_thread()
            communicator = create(store, rank, size)
            ended = device.event()
            with stream.current():
                first = torch.zeros(1, device=device.device)
                communicator.allreduce(first, ReduceOp.SUM).wait()
            stream.record(ended)
            if wait_until(ended.query, timeout):
                connected.append(communicator)
        except BaseException as error:
            errors.append(error)

    store.set(_key(rank), "")
    # NCCL does not return before all ranks have come; the process ends with this thread in it.
    thread = threading.Thread(target=run, name="nccl-connect", daemon=True)
    thread.start()
    thread.join(timeout)
    if connected:
        return connected[0]
    if errors:
        text = str(errors[0]) or type(errors[0]).__name__
        raise TransportError(f"rank {rank} cannot connect by NCCL: {text}") from errors[0]
    missing = [str(other) for other in range(size) if not store.check([_key(other)])]
    cause = "all ranks have begun to; NCCL_DEBUG=INFO logs where NCCL waits"
    if missing:
        cause = f"rank {', '.join(missing)} of {size} is missing"
    raise TransportError(f"the ranks did not connect by NCCL in {timeout:g} s: {cause}")


def _key(rank: int) -> str:
    """Return the store's key that a rank sets before it connects."""
    return f"rank {rank} connects"


def open_nccl_groups(
    descriptors: list[int],
    rank: int,
    ranks: int,
    layout: RegionLayout,
    device: DeviceRuntime,
    stream: DeviceStream,
    on_error: OnTransportError = lambda error: None,
    create: CommunicatorFactory = create_communicator,
) -> StageGroups:
    """Open this rank's NCCL communicators; wait until all ranks of the stage are connected.

    If a rank cannot connect, it cancels the communicators in host memory, so that the others fail
    too.

    Args:
        descriptors: file descriptors of the `Region`: shared memory, and file of the rendezvous
            store.
        rank: number of this rank, from 0.
        ranks: number of ranks of the stage.
        layout: largest tensors that the ranks exchange.
        device: device of this rank.
        stream: compute stream of this rank.
        on_error: called when collectives are aborted because they do not end.
        create: creates the NCCL communicator.

    Raises:
        TransportError: the ranks do not connect in time.
        GroupClosedError: another rank could not connect.
    """
    host = open_shared_groups(descriptors, rank, ranks, layout)
    try:
        # Ranks load their weights in different times; from here on, connecting takes seconds.
        log.info("rank %d waits for the other ranks of its stage", rank)
        host.layers.agree_on_step(RENDEZVOUS_STEP, "")
        store = rendezvous_store(descriptors[1], ranks)
        communicator = connect(store, rank, ranks, device, stream, create)
    except BaseException:
        host.layers.cancel()
        for group in host:
            group.close()
        raise
    group = NcclRankGroup(host, communicator, device, stream, on_error)
    return StageGroups(group, group)
