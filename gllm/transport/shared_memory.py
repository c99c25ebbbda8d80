"""Activations through memory that two processes of one host share.

Each edge is a ring of slots and an event counter. Their descriptors are sent, so nothing has a
name in the file system, and nothing remains when both processes are gone.

A step uses slot step % slots, and at most `slots` steps are in flight. The previous step of a slot
has committed, so its readers are done, before the next one is planned; the receiver therefore needs
no signal back to the sender.
"""

import mmap
import os
import struct

import torch
from torch import Tensor

from gllm.transport.base import EdgeClosedError, EdgeLayout, StepFailedError, TransportError

_HEADER = struct.Struct("<QIIII")
"""Step, tokens, hidden size, element size, and the length of an error text instead of a tensor."""
_ALIGN = 4096
"""Bytes reserved for a header, and alignment of slots: a page."""


class SlotRing:
    """Ring of slots in shared memory. Pages use memory once they are written."""

    def __init__(self, descriptors: list[int], shape: EdgeLayout, dtype: torch.dtype) -> None:
        """Map the memory of an edge."""
        memory, self.event = descriptors[:2]
        self.shape = shape
        self.dtype = dtype
        payload = shape.max_tokens * shape.hidden_size * shape.itemsize
        self._stride = -(-(_ALIGN + payload) // _ALIGN) * _ALIGN
        os.ftruncate(memory, self._stride * shape.slots)
        self.memory = mmap.mmap(memory, self._stride * shape.slots)
        self._is_cancelled = False

    def offset(self, step: int) -> int:
        """Return the offset of the header of a step's slot, in bytes."""
        return step % self.shape.slots * self._stride

    def payload(self, step: int) -> int:
        """Return the offset of a step's activations, in bytes."""
        return self.offset(step) + _ALIGN

    def tensor(self, step: int, tokens: int) -> Tensor:
        """Return the payload of a step's slot as [tokens, hidden_size]."""
        hidden, begin = self.shape.hidden_size, self.payload(step)
        flat = torch.frombuffer(self.memory, dtype=self.dtype, count=tokens * hidden, offset=begin)
        return flat.view(tokens, hidden)

    def signal(self, step: int, tokens: int, error: str = "") -> None:
        """Announce a step's activations, or an error in their place, to the receiver."""
        shape = self.shape
        text = error.encode()[: _ALIGN - _HEADER.size]
        begin = self.offset(step) + _HEADER.size
        self.memory[begin : begin + len(text)] = text
        header = (step, tokens, shape.hidden_size, shape.itemsize, len(text))
        _HEADER.pack_into(self.memory, self.offset(step), *header)
        os.eventfd_write(self.event, 1)

    def wait(self, step: int, tokens: int) -> None:
        """Wait for the sender's signal.

        Raises:
            StepFailedError: the sender announced an error.
            TransportError: the sender announced other activations than those of this step.
            EdgeClosedError: `cancel` was called.
        """
        os.eventfd_read(self.event)
        if self._is_cancelled:
            # For the next call, which has to end too.
            os.eventfd_write(self.event, 1)
            raise EdgeClosedError("the edge is closed")
        shape, begin = self.shape, self.offset(step)
        *header, error = _HEADER.unpack_from(self.memory, begin)
        if error and header[0] == step:
            begin += _HEADER.size
            raise StepFailedError(self.memory[begin : begin + error].decode(errors="replace"))
        expected = [step, tokens, shape.hidden_size, shape.itemsize]
        if header != expected:
            names = "step, tokens, hidden size, element size"
            raise TransportError(
                f"received activations have ({names}) {header}, expected {expected}"
            )

    def cancel(self) -> None:
        """End `wait` with EdgeClosedError, now and later."""
        self._is_cancelled = True
        os.eventfd_write(self.event, 1)

    def close(self) -> None:
        """Unmap the memory once the last tensor in it is freed."""
        # Tensors keep the object alive, but do not prevent its `close`.
        del self.memory


class SharedMemorySender:
    """Sending end of a shared-memory edge."""

    def __init__(self, descriptors: list[int], shape: EdgeLayout, dtype: torch.dtype) -> None:
        """Open this end of an edge."""
        self._ring = SlotRing(descriptors, shape, dtype)

    def send(self, step: int, hidden: Tensor) -> None:
        """Copy [tokens, hidden_size] to the step's slot and notify the receiver."""
        tokens = hidden.shape[0]
        self._ring.tensor(step, tokens).copy_(hidden)
        self._ring.signal(step, tokens)

    def fail(self, step: int, error: str) -> None:
        """Send an error in place of the activations."""
        self._ring.signal(step, 0, error)

    def close(self) -> None:
        """See Sender."""
        self._ring.close()


class SharedMemoryReceiver:
    """Receiving end of a shared-memory edge."""

    def __init__(self, descriptors: list[int], shape: EdgeLayout, dtype: torch.dtype) -> None:
        """Open this end of an edge."""
        self._ring = SlotRing(descriptors, shape, dtype)

    def receive(self, step: int, tokens: int) -> Tensor:
        """Return the step's [tokens, hidden_size] in shared memory.

        Raises StepFailedError, TransportError.
        """
        self._ring.wait(step, tokens)
        return self._ring.tensor(step, tokens)

    def check(self) -> None:
        """Do nothing: the slot is complete before it is received."""

    def cancel(self) -> None:
        """See Receiver."""
        self._ring.cancel()

    def close(self) -> None:
        """See Receiver."""
        self._ring.close()
