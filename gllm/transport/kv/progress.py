"""Counters of the layers that a worker has computed, in the memory behind its KV cache.

Other processes read them without any message. The worker writes one number per layer: steps in the
upper bits, the layers of that step in the lower ones. It computes the steps of a lane in order, so
each lane has a counter that grows and serves all its sequences. Between lanes there is no order: a
decode step overtakes prefill steps with smaller numbers (gllm/scheduler/lanes.py).
"""

import mmap
import os

from gllm.messages.kv_layout import KvLayout

_LAYER_BITS = 16


class LayerProgress:
    """Counters in shared memory of the step and the layers that a worker has computed, by lane.

    Other processes read it to transfer the KV of a layer before the step ends.
    """

    def __init__(self, descriptor: int, layout: KvLayout, is_writable: bool = False) -> None:
        """Map the counters, which are in the page behind a worker's KV cache.

        Args:
            descriptor: File of the worker's KV cache, which may be closed afterwards.
            layout: KV layout of the worker.
            is_writable: True in the worker, which extends the file if necessary.

        Raises:
            ValueError: The file has no such page: the worker does not count its layers.
            OSError: The page cannot be mapped.
        """
        begin, end = layout.num_bytes, layout.num_bytes + mmap.PAGESIZE
        if os.fstat(descriptor).st_size < end:
            if not is_writable:
                raise ValueError("the worker does not count its layers")
            os.ftruncate(descriptor, end)
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        memory = mmap.mmap(descriptor, mmap.PAGESIZE, mmap.MAP_SHARED, access, offset=begin)
        self._counters = memoryview(memory).cast("Q")
        """By lane."""

    def record(self, lane: int, step: int, num_layers: int) -> None:
        """Record that the first `num_layers` layers of a lane's step are in the KV cache.

        Steps are numbered from 1; a new page means that no step was computed. The write is atomic.
        """
        self._counters[lane] = step << _LAYER_BITS | num_layers

    def has_computed(self, lane: int, step: int, num_layers: int) -> bool:
        """Return True if that many layers of a lane's step are in the KV cache."""
        return self._counters[lane] >= step << _LAYER_BITS | num_layers


def open_progress(descriptor: int, layout: KvLayout) -> LayerProgress | None:
    """Open a worker's counters of computed layers, read-only; None if it does not count them."""
    try:
        return LayerProgress(descriptor, layout)
    except ValueError:
        return None
