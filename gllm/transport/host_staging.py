"""Activations between stages that share a GPU, through pinned memory of the host.

They are copied from the device to a shared-memory slot (shared_memory.py) and back. This replaces
NCCL, which refuses two processes on one GPU. It is meant for tests and no faster than host memory.
"""

import queue
import threading

import torch
from torch import Tensor

from gllm.transport.base import EdgeLayout, OnTransportError
from gllm.transport.device_streams import DeviceEvent, DeviceRuntime, DeviceStream
from gllm.transport.shared_memory import SlotRing


class _PinnedSlotRing:
    """Shared-memory slots in pinned memory."""

    def __init__(
        self, descriptors: list[int], shape: EdgeLayout, dtype: torch.dtype, device: DeviceRuntime
    ) -> None:
        self.ring = SlotRing(descriptors, shape, dtype)
        self._memory = torch.frombuffer(self.ring.memory, dtype=torch.uint8)
        device.pin_memory(self._memory)
        self._device = device

    def tensor(self, step: int, tokens: int) -> Tensor:
        """Return the payload of a step's slot as [tokens, hidden_size]."""
        shape, begin = self.ring.shape, self.ring.payload(step)
        count = tokens * shape.hidden_size * shape.itemsize
        flat = self._memory[begin : begin + count].view(self.ring.dtype)
        return flat.view(tokens, shape.hidden_size)

    def close(self) -> None:
        """Free the memory once the device has finished with it."""
        self._device.synchronize()
        self._device.unpin_memory(self._memory)
        del self._memory
        self.ring.close()


class HostStagingSender:
    """Sending end of an edge through pinned host memory."""

    def __init__(
        self,
        descriptors: list[int],
        shape: EdgeLayout,
        dtype: torch.dtype,
        device: DeviceRuntime,
        stream: DeviceStream,
        on_error: OnTransportError = lambda error: None,
        in_background: bool = True,
    ) -> None:
        """Open the sending end.

        Args:
            descriptors: of the edge.
            shape: capacity of the edge.
            dtype: of activations.
            device: device of the stage.
            stream: compute stream of the stage.
            on_error: called if the background thread fails.
            in_background: whether a thread calls `signal_next`.
        """
        self._device, self._on_error = device, on_error
        self._pinned = _PinnedSlotRing(descriptors, shape, dtype, device)
        self._stream = stream
        self._copied = [device.event() for _ in range(shape.slots)]
        self._sent: queue.SimpleQueue[tuple[int, int, DeviceEvent | str] | None]
        self._sent = queue.SimpleQueue()
        """Step, tokens, and the event of their copy, or the error in their place; None ends the
        thread."""
        self._thread: threading.Thread | None = None
        if in_background:
            self._thread = threading.Thread(
                target=self._signal_all, name="host-staging", daemon=True
            )
            self._thread.start()

    def mark_begin(self, step: int) -> None:
        """Note that the stage begins to compute a step, for a data mover that sends it later.

        The device may begin later.
        """
        self._pinned.ring.mark_begin(step)

    def send(self, step: int, hidden: Tensor) -> None:
        """Copy [tokens, hidden_size] to the step's slot; notify the receiver when it is done."""
        copied = self._copied[step % len(self._copied)]
        target = self._pinned.tensor(step, len(hidden))
        with self._stream.current():
            target.copy_(hidden, non_blocking=True)
        self._stream.record(copied)
        self._sent.put((step, len(hidden), copied))

    def fail(self, step: int, error: str) -> None:
        """Send an error in place of the activations."""
        self._sent.put((step, 0, error))

    def signal_next(self) -> bool:
        """Notify the receiver of the next step, in the order of steps.

        Returns:
            False if there is none because this end is being closed.
        """
        sent = self._sent.get()
        if sent is None:
            return False
        step, tokens, copied = sent
        if isinstance(copied, str):
            self._pinned.ring.signal(step, 0, copied)
        else:
            copied.synchronize()
            self._pinned.ring.signal(step, tokens)
        return True

    def close(self) -> None:
        """Free this end, its threads included; no other method runs at the same time or later."""
        self._sent.put(None)
        if self._thread is not None:
            self._thread.join()
        self._pinned.close()

    def _signal_all(self) -> None:
        try:
            self._device.bind_thread()
            while self.signal_next():
                pass
        except Exception as error:
            # The receiver would wait for ever.
            self._on_error(error)


class HostStagingReceiver:
    """Receiving end of an edge through pinned host memory."""

    def __init__(
        self,
        descriptors: list[int],
        shape: EdgeLayout,
        dtype: torch.dtype,
        device: DeviceRuntime,
        stream: DeviceStream,
        on_error: OnTransportError = lambda error: None,
    ) -> None:
        """Open the receiving end; `on_error` is not used, because there is no background thread."""
        self._pinned = _PinnedSlotRing(descriptors, shape, dtype, device)
        self._stream = stream
        # One buffer suffices: its readers are in one stream, in the order of steps.
        self._hidden = device.zeros((shape.max_tokens, shape.hidden_size), dtype)

    @property
    def event(self) -> int:
        """Descriptor of an event that is readable once the next step has arrived."""
        return self._pinned.ring.event

    def has_arrived(self, step: int) -> bool:
        """Return True if `receive` of the next step does not wait."""
        return self._pinned.ring.has_arrived(step)

    def receive(self, step: int, tokens: int) -> Tensor:
        """Return the step's [tokens, hidden_size] on the device.

        Raises StepFailedError, TransportError.
        """
        self._pinned.ring.wait(step, tokens)
        hidden = self._hidden[:tokens]
        with self._stream.current():
            hidden.copy_(self._pinned.tensor(step, tokens), non_blocking=True)
        return hidden

    def check(self) -> None:
        """Do nothing: the slot is complete before it is received."""

    def cancel(self) -> None:
        """End a waiting `receive` and all later ones with EdgeClosedError; called on any thread."""
        self._pinned.ring.cancel()

    def close(self) -> None:
        """Free this end, its threads included; no other method runs at the same time or later."""
        self._pinned.close()
