"""Decodes as graphs: a step's work recorded once for each number of rows, and replayed.

Owns the numbers of rows (buckets), the memory that graphs read from and write to, and padding.
Knows nothing of what a graph computes.

A decode step is small: its thousand kernels take longer to be started one by one than to run. A
graph starts them at a stroke, but with the shapes and addresses that it was recorded with. So a
step is padded to the next bucket, and its inputs are copied to where the graph reads them. A row of
padding has a context of one token, which it writes itself, to a block that is nobody's.

Only block tables differ in width from step to step. A graph's are as wide as any can be, and a step
brings what its contexts use; the rest stays as it was, for nobody looks behind a context's end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gllm.kernels.attention_plan import PagedBatch
from gllm.runtime.cuda.staging import Layout
from gllm.transport.device_streams import DeviceGraph, DeviceRuntime, DeviceStream

FEW = (1, 2, 4, 8)
APART = 8
"""Between larger buckets."""
WARM_UPS = 2
"""Runs before a recording: libraries set themselves up in the first."""

Forward = Callable[[Any, Tensor | None], Tensor]
"""(inputs, activations of the stage before or None) to activations or logits, on the device."""


def buckets(most: int) -> list[int]:
    """Numbers of rows to record, up to `most`."""
    larger = range(FEW[-1] + APART, most, APART)
    return [size for size in (*FEW, *larger) if size < most] + [most]


def bucket_of(rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest of ascending sizes that holds so many rows; None where none does."""
    return next((size for size in sizes if size >= rows), None)


def pad_decodes(rows: PagedBatch, size: int, blocks: int = 1) -> PagedBatch:
    """Decodes with rows of padding up to `size`, and block tables at least `blocks` wide.

    Rows of padding share the block behind the one that stays zero.
    """
    used = len(rows.context_len)
    width = rows.block_table.shape[1]
    table = np.zeros((size, max(width, blocks)), dtype=rows.block_table.dtype)
    table[:used, :width] = rows.block_table
    table[used:, 0] = rows.num_blocks + 1
    context_len = np.ones(size, dtype=rows.context_len.dtype)
    context_len[:used] = rows.context_len
    return replace(
        rows,
        block_table=table,
        query_start=np.arange(size + 1, dtype=rows.query_start.dtype),
        context_len=context_len,
        num_decodes=size,
    )


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A bucket's graph and its memory."""

    graph: DeviceGraph
    flat: Tensor
    """[bytes] uint8: its inputs."""
    inputs: Any
    hidden: Tensor | None
    """[bucket, hidden]"""


class DecodeGraphs:
    """The graphs of one stage, all run by one stream."""

    def __init__(
        self, queues: DeviceRuntime, stream: DeviceStream, table_of: Callable[[Any], Tensor | None]
    ) -> None:
        """`table_of`: of inputs, what is of another width in each step, [rows, blocks], and the
        last of them in memory; None where all inputs of a bucket are laid out alike."""
        self._queues, self._stream, self._table_of = queues, stream, table_of
        self._recorded: dict[int, _Recorded] = {}
        self._output: Tensor | None = None
        """[largest bucket, ...]: of all graphs, for a vocabulary's logits are large."""

    def record(self, size: int, example: Any, hidden: Tensor | None, forward: Forward) -> None:
        """Record a bucket, the largest one first. example: a step's inputs on the host, padding in
        every row and block tables as wide as any; all later steps of this bucket have its layout
        but for those. hidden [bucket, hidden]: on the device, where the stage has it."""
        layout, queues = Layout(example), self._queues
        staged = queues.pinned((layout.num_bytes,), torch.uint8)
        layout.fill(staged)
        flat = queues.zeros((layout.num_bytes,), torch.uint8)
        inputs = layout.views(example, flat)
        with self._stream.current():
            flat.copy_(staged, non_blocking=True)
            for _ in range(WARM_UPS):
                forward(inputs, hidden)
        queues.synchronize()

        def work() -> None:
            made = forward(inputs, hidden)
            if self._output is None:
                self._output = made
            else:
                self._output[:size].copy_(made)

        graph = queues.capture(self._stream, work)
        self._recorded[size] = _Recorded(graph, flat, inputs, hidden)

    def inputs(self, size: int, there: Any, flat: Tensor, hidden: Tensor | None) -> Any:
        """A bucket's own inputs, filled from a step's: `there`, at the beginning of flat [bytes]
        uint8, and hidden [rows, hidden]. To be called within the stream."""
        recorded = self._recorded[size]
        table, wide = self._table_of(there), self._table_of(recorded.inputs)
        ahead = len(recorded.flat)
        if table is not None and wide is not None:
            ahead = int(wide.storage_offset()) * wide.itemsize
            assert ahead == table.storage_offset() * table.itemsize, "laid out alike up to there"
            wide[:, : table.shape[1]].copy_(table)
        recorded.flat[:ahead].copy_(flat[:ahead])
        if recorded.hidden is not None:
            assert hidden is not None, "a stage that is not the first needs activations"
            recorded.hidden[: len(hidden)].copy_(hidden)
            # Layers add to it in place: without this, padding would grow from step to step.
            recorded.hidden[len(hidden) :].zero_()
        return recorded.inputs

    def replay(self, size: int) -> Tensor:
        """What the bucket's graph makes of its inputs, [bucket, ...]; good until the next replay of
        any. To be called within the stream."""
        self._recorded[size].graph.replay()
        assert self._output is not None
        return self._output[:size]
