"""Copies of KV blocks between a device's cache and staging blocks in the memory of the host.

Staging blocks have the layout of a KV cache (KvLayout) in a file that other processes map. They are
pinned, so that the device copies them while it computes. The driver decides which block is copied
where; it starts a copy once the steps before it have ended, and no step uses a block while it is
copied.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gllm.messages.kv_transfer import CopyKvBlocks
from gllm.runtime.worker.cuda.staging import copy_to_device
from gllm.transport.device_streams import DeviceEvent, DeviceRuntime

LayerCache = Sequence[Tensor]
"""Keys, and values unless they are in the keys, of one layer, [blocks, block_size, heads, bytes] as
bytes."""


class KvStager:
    """Copies KV blocks of one worker, layer by layer, on a stream and a thread of its own."""

    def __init__(
        self,
        runtime: DeviceRuntime,
        caches: Sequence[LayerCache],
        staging: Sequence[LayerCache],
        record: Callable[[int, int], None],
    ) -> None:
        """Pin the staging blocks.

        Args:
            runtime: device and its streams.
            caches: KV caches of the layers, on the device.
            staging: the same for the staging blocks, in the memory of the host.
            record: called with the number of a copy and the layers that are copied.

        Raises:
            RuntimeError: the memory cannot be pinned.
        """
        self._runtime = runtime
        self._caches, self._staging = caches, staging
        self._record = record
        self._stream = runtime.stream()
        self._pinned: list[Tensor] = []
        for memory in [each for layer in staging for each in layer]:
            runtime.pin_memory(memory)
            self._pinned.append(memory)

    def copy(self, command: CopyKvBlocks) -> None:
        """Copy blocks, and wait until the device has copied the last one."""
        ids = copy_to_device(torch.tensor(command.block_ids), self._runtime, self._stream)
        start = self._write_layer if command.is_fetched else self._read_layer
        events = []
        for cache, staging in zip(self._caches, self._staging, strict=True):
            with self._stream.current():
                for device, host in zip(cache, staging, strict=True):
                    start(device, host, ids, command.staging_ids)
            events.append(self._mark())
        for num_layers, event in enumerate(events, 1):
            event.synchronize()
            self._record(command.number, num_layers)

    def close(self) -> None:
        """Unpin the memory, after the last copy."""
        while self._pinned:
            self._runtime.unpin_memory(self._pinned.pop())

    def _mark(self) -> DeviceEvent:
        """Return an event after all copies so far."""
        event = self._runtime.event()
        self._stream.record(event)
        return event

    @staticmethod
    def _read_layer(device: Tensor, host: Tensor, ids: Tensor, staging_ids: list[int]) -> None:
        """Copy blocks of a layer from the device."""
        blocks = device.index_select(0, ids)
        for begin, first, count in find_runs(staging_ids):
            host[first : first + count].copy_(blocks[begin : begin + count], non_blocking=True)

    @staticmethod
    def _write_layer(device: Tensor, host: Tensor, ids: Tensor, staging_ids: list[int]) -> None:
        """Copy blocks of a layer to the device."""
        blocks = torch.empty(
            (len(staging_ids), *device.shape[1:]), dtype=device.dtype, device=device.device
        )
        for begin, first, count in find_runs(staging_ids):
            blocks[begin : begin + count].copy_(host[first : first + count], non_blocking=True)
        device.index_copy_(0, ids, blocks)


def find_runs(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Divide ids into runs of consecutive ones.

    Yields:
        For each run its index in `ids`, its first id and its length.
    """
    bounds = [0, *(i for i in range(1, len(ids)) if ids[i] != ids[i - 1] + 1), len(ids)]
    for begin, end in pairwise(bounds):
        if begin < end:
            yield begin, ids[begin], end - begin
