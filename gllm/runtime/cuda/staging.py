"""A step's inputs on their way to the device.

Owns the buffers on both sides and the order of filling, copying and reading them. Knows nothing of
what the inputs mean: they are trees (dataclasses, mappings, sequences) with tensors in them.

There are two buffers, so that one is filled and copied while the device still reads the other. What
shares memory on the host shares it on the device; all of a step goes over in one copy.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gllm.transport.device_streams import DeviceEvent, DeviceRuntime, DeviceStream

T = TypeVar("T")

ALIGNMENT = 16
"""Bytes that every tensor's memory begins at a multiple of: kernels load vectors."""
BUFFERS = 2


def mapped(tree: T, change: Callable[[Tensor], Tensor]) -> T:
    """The tree with every tensor in it changed."""
    return _mapped(tree, change)


def _mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [part.name for part in dataclasses.fields(tree)]
        made = {name: _mapped(getattr(tree, name), change) for name in names}
        return dataclasses.replace(tree, **made)
    if isinstance(tree, Mapping):
        return {key: _mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        values = [_mapped(value, change) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


class _Part(NamedTuple):
    """Memory that one or several tensors of a tree look at, in bytes."""

    storage: torch.UntypedStorage
    begin: int
    """Within the storage."""
    end: int


class Layout:
    """Where the tensors of a tree are in one piece of memory. The same tree shape, the same layout.

    Tensors are on the host.
    """

    def __init__(self, tree: Any) -> None:
        self._parts: dict[int, _Part] = {}
        mapped(tree, self._add)
        self._offsets: dict[int, int] = {}
        self.num_bytes = 0
        """Of all tensors, with what aligns them."""
        for address, part in self._parts.items():
            self._offsets[address] = self.num_bytes
            self.num_bytes += _aligned(part.end - part.begin)

    def fill(self, memory: Tensor) -> None:
        """Copy the tensors to memory [bytes] uint8 of the host."""
        for address, part in self._parts.items():
            begin, count = self._offsets[address], part.end - part.begin
            source = torch.empty(0, dtype=torch.uint8)
            source.set_(part.storage, part.begin, (count,), (1,))
            memory[begin : begin + count].copy_(source)

    def views(self, tree: T, memory: Tensor) -> T:
        """The tree with its tensors in memory [bytes] uint8, a whole number of ALIGNMENT."""
        typed: dict[torch.dtype, Tensor] = {}

        def view(tensor: Tensor) -> Tensor:
            flat = typed.get(tensor.dtype)
            if flat is None:
                flat = typed[tensor.dtype] = memory.view(tensor.dtype)
            begin = 0
            if tensor.numel():
                address = tensor.untyped_storage().data_ptr()
                within = tensor.storage_offset() * tensor.itemsize - self._parts[address].begin
                begin = (self._offsets[address] + within) // tensor.itemsize
            return flat.as_strided(tensor.shape, tensor.stride(), begin)

        return mapped(tree, view)

    def _add(self, tensor: Tensor) -> Tensor:
        if tensor.numel():
            storage = tensor.untyped_storage()
            begin = int(tensor.storage_offset()) * tensor.itemsize
            last = sum(int((n - 1) * s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            end = begin + (1 + last) * tensor.itemsize
            # A storage is copied from a multiple of ALIGNMENT on, so that what is aligned in it
            # stays so.
            begin -= begin % ALIGNMENT
            known = self._parts.get(storage.data_ptr())
            if known is not None:
                begin, end = min(begin, known.begin), max(end, known.end)
            self._parts[storage.data_ptr()] = _Part(storage, begin, end)
        return tensor


class _Buffer:
    """One pair of memory on the host and on the device."""

    def __init__(self, queues: DeviceRuntime, num_bytes: int) -> None:
        self.pinned = queues.pinned((num_bytes,), torch.uint8)
        self.device = queues.zeros((num_bytes,), torch.uint8)
        self.copied: DeviceEvent = queues.event()
        """The host's memory has been read."""
        self.used: DeviceEvent = queues.event()
        """The device's memory has been read."""


class Staging:
    """Takes one step's inputs after the other to the device. Called on one thread."""

    def __init__(self, queues: DeviceRuntime, num_bytes: int) -> None:
        """`num_bytes`: expected of the largest step."""
        self._queues = queues
        self._buffers = [_Buffer(queues, _aligned(num_bytes)) for _ in range(BUFFERS)]
        self._outgrown: list[_Buffer] = []
        """Kept, for they may still be read; each is at most half as large as the next."""
        self._copies: DeviceStream = queues.stream()
        self._steps = 0

    def put(self, tree: T, stream: DeviceStream) -> tuple[T, Tensor]:
        """The tree with its tensors on the device, and all of them as one [bytes] uint8.

        They are there for what is put into `stream` from now until `release`.
        """
        layout = Layout(tree)
        buffer = self._buffer(layout.num_bytes)
        buffer.copied.synchronize()
        layout.fill(buffer.pinned)
        flat = buffer.device[: layout.num_bytes]
        self._copies.wait(buffer.used)
        with self._copies.current():
            flat.copy_(buffer.pinned[: layout.num_bytes], non_blocking=True)
        self._copies.record(buffer.copied)
        stream.wait(buffer.copied)
        return layout.views(tree, buffer.device), flat

    def release(self, stream: DeviceStream) -> None:
        """What `put` gave last is read by nothing that is put into the stream from now on."""
        stream.record(self._buffers[self._steps % BUFFERS].used)
        self._steps += 1

    def _buffer(self, num_bytes: int) -> _Buffer:
        """The one whose turn it is, with room for so many bytes."""
        index = self._steps % BUFFERS
        buffer = self._buffers[index]
        if num_bytes > len(buffer.pinned):
            self._outgrown.append(buffer)
            larger = max(_aligned(num_bytes), 2 * len(buffer.pinned))
            buffer = self._buffers[index] = _Buffer(self._queues, larger)
        return buffer


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def copy_to_device(tensor: Tensor, queues: DeviceRuntime, stream: DeviceStream) -> Tensor:
    """Return a tensor of the host on the device, for what is put into `stream` afterwards."""
    pinned = queues.pinned(tensor.shape, tensor.dtype)
    pinned.copy_(tensor)
    with stream.current():
        copied = torch.empty_like(pinned, device=queues.device)
        return copied.copy_(pinned, non_blocking=True)
