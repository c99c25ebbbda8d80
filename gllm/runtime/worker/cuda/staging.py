"""Staging of a step's inputs: buffers on both sides, and the order of filling, copying and reading.

Inputs are trees (dataclasses, mappings, sequences) with tensors in them. Two buffers let the host
fill one while the device still reads the other. Tensors that share memory on the host share it on
the device, and a step is copied at once.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gllm.transport.device_streams import DeviceEvent, DeviceRuntime, DeviceStream

T = TypeVar("T")

ALIGNMENT = 16
"""Alignment of each tensor in bytes: kernels load vectors."""
NUM_BUFFERS = 2
"""Pairs of host and device memory."""


def map_tensors(tree: T, function: Callable[[Tensor], Tensor]) -> T:
    """Apply a function to each tensor in nested dataclasses, mappings and sequences.

    Returns:
        A copy of the nested objects with the function's results.
    """
    return _map_tensors(tree, function)


def _map_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [part.name for part in dataclasses.fields(tree)]
        changes = {name: _map_tensors(getattr(tree, name), function) for name in names}
        return dataclasses.replace(tree, **changes)
    if isinstance(tree, Mapping):
        return {key: _map_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        values = [_map_tensors(value, function) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


class _MemoryRange(NamedTuple):
    """Part of a storage that tensors of a tree view, in bytes."""

    storage: torch.UntypedStorage
    begin: int
    """Offset in the storage."""
    end: int


class TreeLayout:
    """Offsets at which the tensors of nested dataclasses and sequences are packed into one buffer.

    Equal shapes have equal offsets. The tensors are on the host.
    """

    def __init__(self, tree: Any) -> None:
        self._ranges: dict[int, _MemoryRange] = {}
        """By address of the storage."""
        map_tensors(tree, self._add)
        self._offsets: dict[int, int] = {}
        self.num_bytes = 0
        """Bytes of all tensors, with their alignment."""
        for address, memory_range in self._ranges.items():
            self._offsets[address] = self.num_bytes
            self.num_bytes += _align(memory_range.end - memory_range.begin)

    def fill(self, memory: Tensor) -> None:
        """Copy the tensors to memory [bytes] uint8 of the host."""
        for address, memory_range in self._ranges.items():
            begin, count = self._offsets[address], memory_range.end - memory_range.begin
            source = torch.empty(0, dtype=torch.uint8)
            source.set_(memory_range.storage, memory_range.begin, (count,), (1,))
            memory[begin : begin + count].copy_(source)

    def views(self, tree: T, memory: Tensor) -> T:
        """Return the tree with its tensors as views of memory.

        memory: [bytes] uint8, a multiple of ALIGNMENT.
        """
        typed: dict[torch.dtype, Tensor] = {}

        def view(tensor: Tensor) -> Tensor:
            flat = typed.get(tensor.dtype)
            if flat is None:
                flat = typed[tensor.dtype] = memory.view(tensor.dtype)
            begin = 0
            if tensor.numel():
                address = tensor.untyped_storage().data_ptr()
                within = tensor.storage_offset() * tensor.itemsize - self._ranges[address].begin
                begin = (self._offsets[address] + within) // tensor.itemsize
            return flat.as_strided(tensor.shape, tensor.stride(), begin)

        return map_tensors(tree, view)

    def _add(self, tensor: Tensor) -> Tensor:
        if tensor.numel():
            storage = tensor.untyped_storage()
            begin = int(tensor.storage_offset()) * tensor.itemsize
            last = sum(int((n - 1) * s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            end = begin + (1 + last) * tensor.itemsize
            # A range begins at a multiple of ALIGNMENT, so that tensors aligned in their storage
            # stay aligned.
            begin -= begin % ALIGNMENT
            known = self._ranges.get(storage.data_ptr())
            if known is not None:
                begin, end = min(begin, known.begin), max(end, known.end)
            self._ranges[storage.data_ptr()] = _MemoryRange(storage, begin, end)
        return tensor


class _Buffer:
    """A pair of pinned host memory and device memory."""

    def __init__(self, runtime: DeviceRuntime, num_bytes: int) -> None:
        self.pinned = runtime.allocate_pinned((num_bytes,), torch.uint8)
        self.device = runtime.zeros((num_bytes,), torch.uint8)
        self.copied: DeviceEvent = runtime.event()
        """The pinned memory has been read."""
        self.used: DeviceEvent = runtime.event()
        """The device memory has been read."""


class InputStaging:
    """Copies each step's input tensors to the GPU in one transfer, through two buffers.

    The host fills one buffer while the GPU reads the other.
    """

    def __init__(self, runtime: DeviceRuntime, num_bytes: int) -> None:
        """Allocate the buffers.

        Args:
            runtime: device and its streams.
            num_bytes: expected bytes of the largest step; buffers grow for larger ones.
        """
        self._runtime = runtime
        self._buffers = [_Buffer(runtime, _align(num_bytes)) for _ in range(NUM_BUFFERS)]
        self._outgrown: list[_Buffer] = []
        """Kept because the device may still read them; each is at most half of the next one."""
        self._copy_stream: DeviceStream = runtime.stream()
        self._num_steps = 0

    def put(self, tree: T, stream: DeviceStream) -> tuple[T, Tensor]:
        """Start copying a step's inputs; they are valid in `stream` until `release`.

        Returns:
            The tree with its tensors on the device, and the memory [bytes] uint8 that holds them.
        """
        layout = TreeLayout(tree)
        buffer = self._next_buffer(layout.num_bytes)
        buffer.copied.synchronize()
        layout.fill(buffer.pinned)
        memory = buffer.device[: layout.num_bytes]
        self._copy_stream.wait(buffer.used)
        with self._copy_stream.current():
            memory.copy_(buffer.pinned[: layout.num_bytes], non_blocking=True)
        self._copy_stream.record(buffer.copied)
        stream.wait(buffer.copied)
        return layout.views(tree, buffer.device), memory

    def release(self, stream: DeviceStream) -> None:
        """Allow the last inputs to be overwritten after the work queued on the stream so far."""
        stream.record(self._buffers[self._num_steps % NUM_BUFFERS].used)
        self._num_steps += 1

    def _next_buffer(self, num_bytes: int) -> _Buffer:
        """Return the buffer of the current step, with at least `num_bytes` bytes."""
        index = self._num_steps % NUM_BUFFERS
        buffer = self._buffers[index]
        if num_bytes > len(buffer.pinned):
            self._outgrown.append(buffer)
            larger = max(_align(num_bytes), 2 * len(buffer.pinned))
            buffer = self._buffers[index] = _Buffer(self._runtime, larger)
        return buffer


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def copy_to_device(tensor: Tensor, runtime: DeviceRuntime, stream: DeviceStream) -> Tensor:
    """Copy a host tensor to the GPU; the copy may be used by later work on `stream`."""
    pinned = runtime.allocate_pinned(tensor.shape, tensor.dtype)
    pinned.copy_(tensor)
    with stream.current():
        copied = torch.empty_like(pinned, device=runtime.device)
        return copied.copy_(pinned, non_blocking=True)
