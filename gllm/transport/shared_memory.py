"""Activations through memory that two processes of one host share.

Owns one ring of slots per edge and its signal. Knows nothing of processes: descriptors come by
inheritance, so nothing has a name, and nothing is left behind when all holders are gone.

The slot of a step is step % slots, and slots is the largest number of steps in flight: a slot's
step has committed, and so all its readers are done, before the next step of that slot is planned.
No signal has to travel back.
"""

import mmap
import os
import struct

import torch
from torch import Tensor

from gllm.transport.base import EdgeShape, StepFailed, TransportFault

_HEADER = struct.Struct("<QIIII")
"""Step, tokens, hidden size, element size, and the length of an error text instead of a tensor."""
_ALIGN = 4096


class Ring:
    """The slots as both ends see them. Pages are taken when they are first written."""

    def __init__(self, descriptors: list[int], shape: EdgeShape, dtype: torch.dtype) -> None:
        memory, self.event = descriptors[:2]
        self.shape = shape
        self.dtype = dtype
        payload = shape.max_tokens * shape.hidden_size * shape.itemsize
        self._stride = -(-(_ALIGN + payload) // _ALIGN) * _ALIGN
        os.ftruncate(memory, self._stride * shape.slots)
        self.memory = mmap.mmap(memory, self._stride * shape.slots)

    def offset(self, step: int) -> int:
        """Where the header of a step's slot is."""
        return step % self.shape.slots * self._stride

    def payload(self, step: int) -> int:
        """Where its activations are."""
        return self.offset(step) + _ALIGN

    def tensor(self, step: int, tokens: int) -> Tensor:
        """The slot's payload as [tokens, hidden_size]."""
        hidden, begin = self.shape.hidden_size, self.payload(step)
        flat = torch.frombuffer(self.memory, dtype=self.dtype, count=tokens * hidden, offset=begin)
        return flat.view(tokens, hidden)

    def signal(self, step: int, tokens: int, error: str = "") -> None:
        """Tell the receiver of a step's activations, or of the error in their place."""
        shape = self.shape
        text = error.encode()[: _ALIGN - _HEADER.size]
        begin = self.offset(step) + _HEADER.size
        self.memory[begin : begin + len(text)] = text
        header = (step, tokens, shape.hidden_size, shape.itemsize, len(text))
        _HEADER.pack_into(self.memory, self.offset(step), *header)
        os.eventfd_write(self.event, 1)

    def wait(self, step: int, tokens: int) -> None:
        """Wait for the sender's signal. Raises StepFailed, and TransportFault where it tells of
        anything but this step's activations."""
        os.eventfd_read(self.event)
        shape, begin = self.shape, self.offset(step)
        *found, error = _HEADER.unpack_from(self.memory, begin)
        if error and found[0] == step:
            begin += _HEADER.size
            raise StepFailed(self.memory[begin : begin + error].decode(errors="replace"))
        expected = [step, tokens, shape.hidden_size, shape.itemsize]
        if found != expected:
            names = "step, tokens, hidden size, element size"
            raise TransportFault(f"activations came with ({names}) {found}, not {expected}")


class SharedMemorySender:
    """The earlier stage's end."""

    def __init__(self, descriptors: list[int], shape: EdgeShape, dtype: torch.dtype) -> None:
        self._ring = Ring(descriptors, shape, dtype)

    def send(self, step: int, hidden: Tensor) -> None:
        """Copy [tokens, hidden_size] into the step's slot and wake the receiver."""
        tokens = hidden.shape[0]
        self._ring.tensor(step, tokens).copy_(hidden)
        self._ring.signal(step, tokens)

    def fail(self, step: int, error: str) -> None:
        """Send an error in the place of activations."""
        self._ring.signal(step, 0, error)


class SharedMemoryReceiver:
    """The later stage's end."""

    def __init__(self, descriptors: list[int], shape: EdgeShape, dtype: torch.dtype) -> None:
        self._ring = Ring(descriptors, shape, dtype)

    def receive(self, step: int, tokens: int) -> Tensor:
        """The step's [tokens, hidden_size], in place. Raises StepFailed, TransportFault."""
        self._ring.wait(step, tokens)
        return self._ring.tensor(step, tokens)

    def check(self) -> None:
        """Nothing: what is received has arrived."""
