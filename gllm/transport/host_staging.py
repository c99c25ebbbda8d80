"""Activations from one stage to the next over memory of the host, for stages that share a GPU.

Owns the copies from the device to the ring and from there back (shared_memory.py has the ring).
Knows nothing of models. NCCL refuses two processes on one GPU; this takes its place there, in tests
above all, and is no faster than the host's memory.
"""

import queue
import threading

import torch
from torch import Tensor

from gllm.transport.base import EdgeShape, OnFault
from gllm.transport.device_streams import DeviceEvent, DeviceRuntime, DeviceStream
from gllm.transport.shared_memory import Ring


class _PinnedRing:
    """The ring, where the device copies from and to it by itself."""

    def __init__(
        self, descriptors: list[int], shape: EdgeShape, dtype: torch.dtype, queues: DeviceRuntime
    ) -> None:
        self.ring = Ring(descriptors, shape, dtype)
        self._memory = torch.frombuffer(self.ring.memory, dtype=torch.uint8)
        queues.pin(self._memory)

    def tensor(self, step: int, tokens: int) -> Tensor:
        """The slot's payload as [tokens, hidden_size]."""
        shape, begin = self.ring.shape, self.ring.payload(step)
        count = tokens * shape.hidden_size * shape.itemsize
        flat = self._memory[begin : begin + count].view(self.ring.dtype)
        return flat.view(tokens, shape.hidden_size)


class HostStagingSender:
    """The earlier stage's end."""

    def __init__(
        self,
        descriptors: list[int],
        shape: EdgeShape,
        dtype: torch.dtype,
        queues: DeviceRuntime,
        stream: DeviceStream,
        on_fault: OnFault = lambda error: None,
        in_background: bool = True,
    ) -> None:
        """`in_background`: whether a thread calls `signal_next`; on_fault: called where it ends."""
        self._queues, self._on_fault = queues, on_fault
        self._pinned = _PinnedRing(descriptors, shape, dtype, queues)
        self._stream = stream
        self._copied = [queues.event() for _ in range(shape.slots)]
        self._sent: queue.SimpleQueue[tuple[int, int, DeviceEvent | str]] = queue.SimpleQueue()
        """Step, tokens, and when they are there or why there are none."""
        if in_background:
            threading.Thread(target=self._signal_all, name="host-staging", daemon=True).start()

    def send(self, step: int, hidden: Tensor) -> None:
        """Copy [tokens, hidden_size] into the step's slot; the receiver hears when it is there."""
        copied = self._copied[step % len(self._copied)]
        target = self._pinned.tensor(step, len(hidden))
        with self._stream.current():
            target.copy_(hidden, non_blocking=True)
        self._stream.record(copied)
        self._sent.put((step, len(hidden), copied))

    def fail(self, step: int, error: str) -> None:
        """Send an error in the place of activations."""
        self._sent.put((step, 0, error))

    def signal_next(self) -> None:
        """Wake the receiver for the next step, in the order of steps."""
        step, tokens, copied = self._sent.get()
        if isinstance(copied, str):
            self._pinned.ring.signal(step, 0, copied)
        else:
            copied.synchronize()
            self._pinned.ring.signal(step, tokens)

    def _signal_all(self) -> None:
        try:
            self._queues.bind_thread()
            while True:
                self.signal_next()
        except Exception as error:
            # The receiver would wait for ever.
            self._on_fault(error)


class HostStagingReceiver:
    """The later stage's end."""

    def __init__(
        self,
        descriptors: list[int],
        shape: EdgeShape,
        dtype: torch.dtype,
        queues: DeviceRuntime,
        stream: DeviceStream,
        on_fault: OnFault = lambda error: None,
    ) -> None:
        """on_fault: never called, for all is done by the caller's thread."""
        self._pinned = _PinnedRing(descriptors, shape, dtype, queues)
        self._stream = stream
        # One is enough: all that reads it is in one stream, in the order of steps.
        self._hidden = queues.zeros((shape.max_tokens, shape.hidden_size), dtype)

    def receive(self, step: int, tokens: int) -> Tensor:
        """The step's [tokens, hidden_size] on the device. Raises StepFailed, TransportFault."""
        self._pinned.ring.wait(step, tokens)
        hidden = self._hidden[:tokens]
        with self._stream.current():
            hidden.copy_(self._pinned.tensor(step, tokens), non_blocking=True)
        return hidden

    def check(self) -> None:
        """Nothing: what is received is there already."""
