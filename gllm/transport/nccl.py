"""Activations from GPU to GPU by NCCL, point to point.

Owns one communicator of two ranks per edge, the buffers on both sides, and what happens when one
side does not come. Knows nothing of models.

What a step brings is announced through the host first, by the header of a shared-memory ring
(shared_memory.py), whose slots carry nothing else: the receiver asks NCCL only for what has been
sent, and a step that failed is an error in its header and no call of NCCL. So none waits for a peer
that has nothing to say. What fails, or does not end in time because a process is gone or a link is
down, is aborted: the streams go on, the stage hears of the cause at once, and the next call raises
TransportFault with it.
"""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import FileStore, Store

from gllm.transport.base import EdgeShape, OnFault, TransportFault
from gllm.transport.device_streams import DeviceEvent, DeviceRuntime, DeviceStream
from gllm.transport.shared_memory import Ring

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 60.0
"""For a step's activations once they are announced: the stage before may have a step to compute."""
LOOK_SECONDS = 1.0
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.05
"""Seconds between two looks of a host that waits: doubled from look to look."""
UNNAMED = "NCCL reports an error that this version of PyTorch cannot name; NCCL_DEBUG=WARN logs it"
SENDER, RECEIVER = 0, 1


class Work(Protocol):
    """A transfer under way, as torch.distributed's."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""

    def exception(self) -> BaseException | None:
        """What it ended with, if not well. PyTorch 2.11 raises TypeError whatever that is."""

    def wait(self) -> bool:
        """Let the current stream wait for it."""


class Group(Protocol):
    """Two ranks, as a process group of torch.distributed."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        """Send one tensor behind what is in the current stream."""

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        """Receive one tensor."""

    def abort(self) -> None:
        """End all transfers under way."""


MakeGroup = Callable[[Store, int], Group]


def nccl_group(store: Store, rank: int) -> Group:
    """A communicator of two GPUs. Time-outs and errors are for Watch to act upon; torch would end
    the process."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    wait_for_peer(store, rank)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=365)
    group: Any = distributed.ProcessGroupNCCL(store, rank, 2, options)
    return cast(Group, group)


def meet(descriptors: list[int], rank: int, make: MakeGroup) -> Group:
    """Make the group of an edge's two ends, which find each other by a file that both inherited."""
    # A descriptor of the store's own: it opens the file by this name until the process ends.
    path = f"/proc/{os.getpid()}/fd/{os.dup(descriptors[2])}"
    return make(FileStore(path, 2), rank)


def wait_for_peer(store: Store, rank: int) -> None:
    """Wait until both ends are there, asleep: NCCL would keep a core busy with it."""
    store.set(f"rank {rank} is there", "")
    wait_until(lambda: store.check([f"rank {1 - rank} is there"]))


def wait_until(done: Callable[[], bool], timeout: float = math.inf) -> bool:
    """Sleep until `done()`, longer from look to look; False after `timeout` seconds."""
    pause, end = SHORTEST_PAUSE, time.monotonic() + timeout
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return True


@dataclass(slots=True)
class _Transfer:
    """A transfer that is watched."""

    step: int
    begin: float
    work: Work
    ended: DeviceEvent
    """Recorded in the stream of transfers behind it."""
    is_suspect: bool = False
    """It was complete at an earlier look, and the stream has not got past it."""

    def failure(self) -> str | None:
        """Why a complete transfer failed, empty if it did not; None if that is not known yet."""
        try:
            error = self.work.exception()
        except TypeError:
            # An error completes a transfer too, but its stream does not get past it.
            if self.ended.query():
                return ""
            was_suspect, self.is_suspect = self.is_suspect, True
            return UNNAMED if was_suspect else None
        return "" if error is None else str(error) or type(error).__name__


class Watch:
    """Watches the transfers of one end. `broken` becomes why all of them were aborted."""

    def __init__(
        self,
        group: Group,
        timeout: float,
        on_fault: OnFault = lambda error: None,
        bind_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """on_fault: called with a TransportFault when transfers are aborted; bind_thread: called
        first on the thread that looks."""
        self.broken = ""
        self._group, self._timeout = group, timeout
        self._on_fault, self._bind_thread = on_fault, bind_thread
        self._under_way: deque[_Transfer] = deque()

    def add(self, step: int, work: Work, ended: DeviceEvent, now: float) -> None:
        """Watch a transfer that began at `now` seconds, and behind which `ended` is recorded."""
        self._under_way.append(_Transfer(step, now, work, ended))

    def look(self, now: float) -> None:
        """Forget transfers that have ended; abort all if one failed or takes too long."""
        while self._under_way and not self.broken:
            transfer = self._under_way[0]
            failure = transfer.failure() if transfer.work.is_completed() else None
            if failure:
                self.abort(f"the transfer of step {transfer.step} failed: {failure}")
            elif failure is not None:
                self._under_way.popleft()
                continue
            elif now - transfer.begin > self._timeout:
                text = f"the transfer of step {transfer.step} did not end in {self._timeout:g} s"
                self.abort(text)
            return

    def check(self) -> None:
        """Raises TransportFault where transfers have been aborted."""
        if self.broken:
            raise TransportFault(self.broken)

    def start(self) -> None:
        """Look on a thread, again and again."""
        threading.Thread(target=self._look_often, name="nccl-watch", daemon=True).start()

    def abort(self, cause: str) -> None:
        """End all transfers and report the cause."""
        # First the cause: who is freed by the abort asks for it.
        self.broken = cause
        try:
            self._group.abort()
        finally:
            self._on_fault(TransportFault(cause))

    def _look_often(self) -> None:
        try:
            self._bind_thread()
            while not self.broken:
                time.sleep(LOOK_SECONDS)
                self.look(time.monotonic())
        except Exception as error:
            log.exception("transfers are not watched any more")
            if not self.broken:
                self.abort(f"transfers cannot be watched: {type(error).__name__}: {error}")


class _End:
    """What both ends have: slots on the device, a stream for transfers, the group, its watch."""

    def __init__(
        self,
        descriptors: list[int],
        shape: EdgeShape,
        dtype: torch.dtype,
        queues: DeviceRuntime,
        rank: int,
        make: MakeGroup,
        on_fault: OnFault,
        in_background: bool,
    ) -> None:
        """`in_background`: whether a thread looks after transfers. Raises TransportFault where the
        first one does not end."""
        self._queues = queues
        self.ring = Ring(descriptors, shape, dtype)
        self.group = meet(descriptors, rank, make)
        self.transfers: DeviceStream = queues.stream()
        self.watch = Watch(self.group, TIMEOUT_SECONDS, on_fault, queues.bind_thread)
        self._hidden = queues.zeros((shape.slots, shape.max_tokens, shape.hidden_size), dtype)
        self._ready = [queues.event() for _ in range(shape.slots)]
        self._done = [queues.event() for _ in range(shape.slots)]
        # The first transfer sets the communicator up, and the host waits for the peer meanwhile.
        first = queues.event()
        with self.transfers.current():
            transfer = self.group.send if rank == SENDER else self.group.recv
            transfer([self._hidden[0, :1, :1]], 1 - rank, 0).wait()
        self.transfers.record(first)
        if not wait_until(first.query, TIMEOUT_SECONDS):
            self.watch.abort(f"the first transfer did not end in {TIMEOUT_SECONDS:g} s")
        self.watch.check()
        if in_background:
            self.watch.start()

    def watch_transfer(self, step: int, work: Work) -> None:
        """Let the stream of transfers wait for a step's, and watch that it ends."""
        ended = self._queues.event()
        with self.transfers.current():
            work.wait()
        self.transfers.record(ended)
        self.watch.add(step, work, ended, time.monotonic())

    def slot(self, step: int, tokens: int) -> tuple[Tensor, DeviceEvent, DeviceEvent]:
        """A step's [tokens, hidden_size], when a transfer may begin, when it is done with."""
        index = step % len(self._ready)
        return self._hidden[index, :tokens], self._ready[index], self._done[index]


class NcclSender:
    """The earlier stage's end."""

    def __init__(
        self,
        descriptors: list[int],
        shape: EdgeShape,
        dtype: torch.dtype,
        queues: DeviceRuntime,
        stream: DeviceStream,
        on_fault: OnFault = lambda error: None,
        make: MakeGroup = nccl_group,
        in_background: bool = True,
    ) -> None:
        common = (descriptors, shape, dtype, queues)
        self._end = _End(*common, SENDER, make, on_fault, in_background)
        self._stream = stream

    def send(self, step: int, hidden: Tensor) -> None:
        """Announce [tokens, hidden_size] and send a copy of it. Raises TransportFault."""
        end = self._end
        end.watch.check()
        buffer, filled, sent = end.slot(step, len(hidden))
        # The step before in this slot may have failed elsewhere, and be under way still.
        self._stream.wait(sent)
        with self._stream.current():
            buffer.copy_(hidden)
        self._stream.record(filled)
        end.transfers.wait(filled)
        # Before the transfer, which some groups let the host wait for.
        end.ring.signal(step, len(hidden))
        with end.transfers.current():
            work = end.group.send([buffer], RECEIVER, 0)
        end.watch_transfer(step, work)
        end.transfers.record(sent)

    def fail(self, step: int, error: str) -> None:
        """Announce an error in the place of activations."""
        self._end.ring.signal(step, 0, error)


class NcclReceiver:
    """The later stage's end."""

    def __init__(
        self,
        descriptors: list[int],
        shape: EdgeShape,
        dtype: torch.dtype,
        queues: DeviceRuntime,
        stream: DeviceStream,
        on_fault: OnFault = lambda error: None,
        make: MakeGroup = nccl_group,
        in_background: bool = True,
    ) -> None:
        common = (descriptors, shape, dtype, queues)
        self._end = _End(*common, RECEIVER, make, on_fault, in_background)
        self._stream = stream
        self._last: DeviceEvent | None = None
        """Of the slot received last: to be recorded behind what reads it."""

    def receive(self, step: int, tokens: int) -> Tensor:
        """The step's [tokens, hidden_size] on the device, as soon as it is announced; it arrives
        later. Raises StepFailed, TransportFault."""
        end = self._end
        end.ring.wait(step, tokens)
        end.watch.check()
        if self._last is not None:
            self._stream.record(self._last)
        buffer, arrived, read = end.slot(step, tokens)
        end.transfers.wait(read)
        with end.transfers.current():
            work = end.group.recv([buffer], SENDER, 0)
        end.watch_transfer(step, work)
        end.transfers.record(arrived)
        self._stream.wait(arrived)
        self._last = read
        return buffer

    def check(self) -> None:
        """Raises TransportFault where transfers have been aborted."""
        self._end.watch.check()
