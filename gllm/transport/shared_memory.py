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


class _Ring:
    """The slots as both ends see them. Pages are taken when they are first written."""

    def __init__(self, descriptors: list[int], shape: EdgeShape, dtype: torch.dtype) -> None:
        memory, self.event = descriptors
        self.shape = shape
        self.dtype = dtype
        payload = shape.max_tokens * shape.hidden_size * shape.itemsize
        self._stride = -(-(_ALIGN + payload) // _ALIGN) * _ALIGN
        os.ftruncate(memory, self._stride * shape.slots)
        self.memory = mmap.mmap(memory, self._stride * shape.slots)

    def offset(self, step: int) -> int:
        """Where the header of a step's slot is; the payload follows a page later."""
        return step % self.shape.slots * self._stride

    def tensor(self, step: int, tokens: int) -> Tensor:
        """The slot's payload as [tokens, hidden_size]."""
        hidden = self.shape.hidden_size
        begin = self.offset(step) + _ALIGN
        flat = torch.frombuffer(self.memory, dtype=self.dtype, count=tokens * hidden, offset=begin)
        return flat.view(tokens, hidden)


class SharedMemorySender:
    """The earlier stage's end."""

    def __init__(self, descriptors: list[int], shape: EdgeShape, dtype: torch.dtype) -> None:
        self._ring = _Ring(descriptors, shape, dtype)

    def send(self, step: int, hidden: Tensor) -> None:
        """Copy [tokens, hidden_size] into the step's slot and wake the receiver."""
        tokens = hidden.shape[0]
        self._ring.tensor(step, tokens).copy_(hidden)
        self._signal(step, tokens, 0)

    def fail(self, step: int, error: str) -> None:
        """Send an error in the place of activations."""
        text = error.encode()[: _ALIGN - _HEADER.size]
        begin = self._ring.offset(step) + _HEADER.size
        self._ring.memory[begin : begin + len(text)] = text
        self._signal(step, 0, len(text))

    def _signal(self, step: int, tokens: int, error: int) -> None:
        shape = self._ring.shape
        header = (step, tokens, shape.hidden_size, shape.itemsize, error)
        _HEADER.pack_into(self._ring.memory, self._ring.offset(step), *header)
        os.eventfd_write(self._ring.event, 1)


class SharedMemoryReceiver:
    """The later stage's end."""

    def __init__(self, descriptors: list[int], shape: EdgeShape, dtype: torch.dtype) -> None:
        self._ring = _Ring(descriptors, shape, dtype)

    def receive(self, step: int, tokens: int) -> Tensor:
        """The step's [tokens, hidden_size], in place. Raises StepFailed, TransportFault."""
        os.eventfd_read(self._ring.event)
        shape, begin = self._ring.shape, self._ring.offset(step)
        *found, error = _HEADER.unpack_from(self._ring.memory, begin)
        if error and found[0] == step:
            begin += _HEADER.size
            raise StepFailed(self._ring.memory[begin : begin + error].decode(errors="replace"))
        expected = [step, tokens, shape.hidden_size, shape.itemsize]
        if found != expected:
            names = "step, tokens, hidden size, element size"
            raise TransportFault(f"activations came with ({names}) {found}, not {expected}")
        return self._ring.tensor(step, tokens)
