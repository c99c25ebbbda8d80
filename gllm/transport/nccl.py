"""Activations from GPU to GPU by NCCL, point to point.

Owns one communicator of two ranks per edge, the buffers on both sides, and what happens when one
side does not come. Knows nothing of models.

What a step brings is announced through the host first, by the header of a shared-memory ring
(shared_memory.py), whose slots carry nothing else: the receiver asks NCCL only for what has been
sent, and a step that failed is an error in its header and no call of NCCL. So none waits for a peer
that has nothing to say. What still does not end in time, because a process is gone or a link is
down, is aborted: the streams go on, and the next call raises TransportFault with the cause.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import FileStore, Store

from gllm.streams import Event, Queues, Stream
from gllm.transport.base import EdgeShape, TransportFault
from gllm.transport.shared_memory import Ring

TIMEOUT_SECONDS = 60.0
"""For a step's activations once they are announced: the stage before may have a step to compute."""
LOOK_SECONDS = 1.0
SENDER, RECEIVER = 0, 1


class Work(Protocol):
    """A transfer under way, as torch.distributed's."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""

    def exception(self) -> BaseException | None:
        """What it ended with, if not well."""

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
    """A communicator of two GPUs. The time-out is ours, so that the process is not ended by
    torch's."""
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=365)
    group: Any = distributed.ProcessGroupNCCL(store, rank, 2, options)
    return cast(Group, group)


def meet(descriptors: list[int], rank: int, make: MakeGroup) -> Group:
    """The group of an edge's two ends, which find each other by a file that both inherited. Returns
    when both are there."""
    # A descriptor of the store's own: it opens the file by this name until the process ends.
    path = f"/proc/{os.getpid()}/fd/{os.dup(descriptors[2])}"
    return make(FileStore(path, 2), rank)


class Watch:
    """Looks after the transfers of one end. `broken` becomes why they have ended, all of them."""

    def __init__(self, group: Group, timeout: float) -> None:
        self.broken = ""
        self._group, self._timeout = group, timeout
        self._under_way: deque[tuple[int, float, Work]] = deque()

    def add(self, step: int, work: Work, now: float) -> None:
        """A transfer that began at `now` seconds."""
        self._under_way.append((step, now, work))

    def look(self, now: float) -> None:
        """Forget transfers that have ended, abort all where one failed or takes too long."""
        while self._under_way and not self.broken:
            step, begin, work = self._under_way[0]
            if work.is_completed():
                error = work.exception()
                if error is None:
                    self._under_way.popleft()
                    continue
                self._abort(f"the transfer of step {step} failed: {error}")
            elif now - begin > self._timeout:
                self._abort(f"the transfer of step {step} did not end in {self._timeout:g} s")
            return

    def check(self) -> None:
        """Raises TransportFault where transfers have been aborted."""
        if self.broken:
            raise TransportFault(self.broken)

    def start(self) -> None:
        """Look on a thread, again and again."""
        threading.Thread(target=self._look_often, name="nccl-watch", daemon=True).start()

    def _look_often(self) -> None:
        while not self.broken:
            time.sleep(LOOK_SECONDS)
            self.look(time.monotonic())

    def _abort(self, cause: str) -> None:
        # First the cause: who is freed by the abort asks for it.
        self.broken = cause
        self._group.abort()


class _End:
    """What both ends have: slots on the device, a stream for transfers, the group, its watch."""

    def __init__(
        self,
        descriptors: list[int],
        shape: EdgeShape,
        dtype: torch.dtype,
        queues: Queues,
        rank: int,
        make: MakeGroup,
        in_background: bool,
    ) -> None:
        """`in_background`: whether a thread looks after transfers."""
        self.ring = Ring(descriptors, shape, dtype)
        self.group = meet(descriptors, rank, make)
        self.transfers: Stream = queues.stream()
        self.watch = Watch(self.group, TIMEOUT_SECONDS)
        self._hidden = queues.zeros((shape.slots, shape.max_tokens, shape.hidden_size), dtype)
        self._ready = [queues.event() for _ in range(shape.slots)]
        self._done = [queues.event() for _ in range(shape.slots)]
        # The first transfer sets the communicator up, and the host waits for the peer meanwhile.
        with self.transfers.current():
            transfer = self.group.send if rank == SENDER else self.group.recv
            transfer([self._hidden[0, :1, :1]], 1 - rank, 0).wait()
        queues.synchronize()
        if in_background:
            self.watch.start()

    def slot(self, step: int, tokens: int) -> tuple[Tensor, Event, Event]:
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
        queues: Queues,
        stream: Stream,
        make: MakeGroup = nccl_group,
        in_background: bool = True,
    ) -> None:
        self._end = _End(descriptors, shape, dtype, queues, SENDER, make, in_background)
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
            end.watch.add(step, work, time.monotonic())
            work.wait()
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
        queues: Queues,
        stream: Stream,
        make: MakeGroup = nccl_group,
        in_background: bool = True,
    ) -> None:
        self._end = _End(descriptors, shape, dtype, queues, RECEIVER, make, in_background)
        self._stream = stream
        self._last: Event | None = None
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
            end.watch.add(step, work, time.monotonic())
            work.wait()
        end.transfers.record(arrived)
        self._stream.wait(arrived)
        self._last = read
        return buffer

    def check(self) -> None:
        """Raises TransportFault where transfers have been aborted."""
        self._end.watch.check()
