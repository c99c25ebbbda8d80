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


class _PinnedSlotRing(SlotRing):
    """Shared-memory slots in pinned memory of the host."""

    def __init__(
        self,
        descriptors: list[int],
        shape: EdgeLayout,
        dtype: torch.dtype,
        device: DeviceRuntime,
        stream: DeviceStream,
    ) -> None:
        """Map and pin the memory of an edge.

        Args:
            descriptors: file descriptors of the edge.
            shape: capacity of the edge.
            dtype: dtype of activations.
            device: device of the stage.
            stream: compute stream of the stage.
        """
        super().__init__(descriptors, shape, dtype)
        self._pinned = torch.frombuffer(self.memory, dtype=torch.uint8)
        device.pin_memory(self._pinned)
        self._device, self._stream = device, stream

    def tensor(self, step: int, tokens: int) -> Tensor:
        """Return the payload of a step's slot as [tokens, hidden_size]."""
        begin, count = self.payload(step), tokens * self.shape.hidden_size * self.shape.itemsize
        return self._pinned[begin : begin + count].view(self.dtype).view(tokens, -1)

    def close(self) -> None:
        """Free this end, its threads included; no other method runs at the same time or later."""
        self._device.synchronize()
        self._device.unpin_memory(self._pinned)
        del self._pinned
        super().close()


class HostStagingSender(_PinnedSlotRing):
    """Sends activations to a stage on the same GPU by pinned host memory; a Sender."""

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
            descriptors: file descriptors of the `Edge`.
            shape: shape of activations and number of step buffers.
            dtype: dtype of activations.
            device: device of the stage.
            stream: compute stream of the stage.
            on_error: called if the background thread fails.
            in_background: True to call `signal_next` on a thread.
        """
        super().__init__(descriptors, shape, dtype, device, stream)
        self._on_error = on_error
        self._copied = [device.event() for _ in range(shape.slots)]
        self._sent: queue.SimpleQueue[tuple[int, int, DeviceEvent | str] | None]
        self._sent = queue.SimpleQueue()
        """Step, tokens, and the event of their copy, or the error in their place; None ends the
        thread."""
        self._thread = threading.Thread(target=self._signal_all, name="host-staging", daemon=True)
        if in_background:
            self._thread.start()

    def send(self, step: int, hidden: Tensor) -> None:
        """Copy [tokens, hidden_size] to the step's slot; notify the receiver when it is done."""
        copied = self._copied[step % len(self._copied)]
        target = self.tensor(step, len(hidden))
        with self._stream.current():
            target.copy_(hidden, non_blocking=True)
        self._stream.record(copied)
        self._sent.put((step, len(hidden), copied))

    def fail(self, step: int, error: str) -> None:
        """Send an error in place of the activations."""
        self._sent.put((step, 0, error))

    def signal_next(self) -> bool:
        """Wait until the next step is copied to host memory and notify the receiver.

        Returns:
            False if this end is being closed.
        """
        sent = self._sent.get()
        if sent is None:
            return False
        step, tokens, copied = sent
        if isinstance(copied, str):
            self.signal(step, 0, copied)
        else:
            copied.synchronize()
            self.signal(step, tokens)
        return True

    def close(self) -> None:
        """Free this end, its threads included; no other method runs at the same time or later."""
        self._sent.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        super().close()

    def _signal_all(self) -> None:
        try:
            self._device.bind_thread()
            while self.signal_next():
                pass
        except Exception as error:
            # The receiver would wait for ever.
            self._on_error(error)


class HostStagingReceiver(_PinnedSlotRing):
    """Receives activations from a stage on the same GPU by pinned host memory; a Receiver."""

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
        super().__init__(descriptors, shape, dtype, device, stream)
        # One buffer suffices: its readers are in one stream, in the order of steps.
        self._hidden = device.zeros((shape.max_tokens, shape.hidden_size), dtype)

    def receive(self, step: int, tokens: int) -> Tensor:
        """Return the step's [tokens, hidden_size] on the device.

        Raises StepFailedError, TransportError.
        """
        self.wait(step, tokens)
        hidden = self._hidden[:tokens]
        with self._stream.current():
            hidden.copy_(self.tensor(step, tokens), non_blocking=True)
        return hidden

    def check(self) -> None:
        """Do nothing: the slot is complete before it is received."""
