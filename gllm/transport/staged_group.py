"""Collectives of ranks that share a GPU, through pinned memory of the host.

Parts are copied from the device to the group in host memory and its results back, and the host
waits for every one. This replaces NCCL, which refuses two processes on one GPU. It is meant for
tests: steps have no graphs and the device is idle while the host adds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gllm.transport.base import OnTransportError
from gllm.transport.device_group import DeviceRankGroup
from gllm.transport.device_streams import DeviceEvent, DeviceRuntime, DeviceStream
from gllm.transport.groups import StageGroups
from gllm.transport.region import RegionLayout
from gllm.transport.shared_region import open_shared_groups


class _PinnedBuffer:
    """Pinned memory that the device reads or writes; it grows with the largest tensor."""

    def __init__(self, device: DeviceRuntime) -> None:
        self._device = device
        self._memory = device.allocate_pinned((0,), torch.uint8)
        self._outgrown: list[Tensor] = []
        """Kept because the device may still read them; each is at most half of the next one."""
        self.used: DeviceEvent = device.event()
        """Recorded after the device's last access."""

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the memory as a tensor."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if num_bytes > len(self._memory):
            self._outgrown.append(self._memory)
            size = max(num_bytes, 2 * len(self._memory))
            self._memory = self._device.allocate_pinned((size,), torch.uint8)
        return self._memory[:num_bytes].view(dtype).view(tuple(shape))


class StagedRankGroup(DeviceRankGroup):
    """Communicator of tensor parallel ranks on one GPU; tensors are reduced in host memory."""

    can_capture = False

    def __init__(self, host: StageGroups, device: DeviceRuntime, stream: DeviceStream) -> None:
        """Create from the communicators of the same ranks in host memory.

        Args:
            host: communicators in host memory.
            device: device of this rank.
            stream: compute stream; every method is called within it.
        """
        super().__init__(host)
        self._device, self._stream = device, stream
        self._download, self._upload = _PinnedBuffer(device), _PinnedBuffer(device)

    def sum(self, partial: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the sum of the ranks' parts, the same bits on all ranks; can be captured."""
        part = self._to_host(partial.to(torch.float32))
        target = self._host.layers.partial(*part.shape)
        part = part if target is None else target.copy_(part)
        total = self._to_device(self._host.layers.sum(part, None, torch.float32))
        if bias is not None:
            total = total.add_(bias)
        return total.to(dtype)

    def maximum(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum [rows] float32 of the ranks' values; can be captured."""
        return self._to_device(self._host.layers.maximum(self._to_host(values)))

    def gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """Return the ranks' parts side by side, [rows, sum of sizes], on rank 0; elsewhere None."""
        whole = self._host.head.gather(self._to_host(part), sizes)
        return None if whole is None else self._to_device(whole)

    def broadcast(self, values: Tensor | None, count: int) -> Tensor:
        """Return rank 0's values [count] int64 on all ranks; values: ignored on other ranks."""
        on_host = None if values is None else self._to_host(values)
        return self._to_device(self._host.head.broadcast(on_host, count))

    def end_step(self, step: int) -> None:
        """Do nothing: the host has already waited for every collective."""

    def _abort(self) -> None:
        """Do nothing: the device has no collectives."""

    def _to_host(self, tensor: Tensor) -> Tensor:
        """Return a copy in pinned memory, valid until the next call."""
        buffer = self._download
        pinned = buffer.tensor(tensor.shape, tensor.dtype)
        with self.launching(), self._stream.current():
            pinned.copy_(tensor, non_blocking=True)
        self._stream.record(buffer.used)
        buffer.used.synchronize()
        return pinned

    def _to_device(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device, valid in the compute stream."""
        buffer = self._upload
        buffer.used.synchronize()
        pinned = buffer.tensor(tensor.shape, tensor.dtype)
        pinned.copy_(tensor)
        with self.launching(), self._stream.current():
            copied = torch.empty_like(pinned, device=self._device.device)
            copied.copy_(pinned, non_blocking=True)
        self._stream.record(buffer.used)
        return copied


def open_staged_groups(
    descriptors: list[int],
    rank: int,
    ranks: int,
    layout: RegionLayout,
    device: DeviceRuntime,
    stream: DeviceStream,
    on_error: OnTransportError = lambda error: None,
) -> StageGroups:
    """Open the communicators of a rank that shares a GPU with the other ranks of its stage.

    Args:
        descriptors: file descriptors of the `Region`.
        rank: number of this rank, from 0.
        ranks: number of ranks of the stage.
        layout: largest tensors that the ranks exchange.
        device: device of this rank.
        stream: compute stream of this rank.
        on_error: not used, because there is no background thread.
    """
    host = open_shared_groups(descriptors, rank, ranks, layout)
    group = StagedRankGroup(host, device, stream)
    return StageGroups(group, group)
