"""CUDA graphs of decodes: a step is recorded once per padded number of rows and replayed.

A decode step is small: launching its thousand kernels takes longer than running them. A graph
launches them at once, but with the shapes and addresses of its recording. A step is therefore
padded to the next recorded size, and its inputs are copied to the graph's memory. A padding row has
a context of one token, which it writes to a block that no sequence holds.

Only block tables differ in width between steps. A graph's table has the largest possible width; a
step overwrites the columns that its contexts use. The other columns keep old values, which no
kernel reads because they are behind the end of every context.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gllm.kernels.attention_plan import (
    AttentionPlan,
    PagedBatch,
    build_device_tables,
    compute_slot_mapping,
    list_prefill_tiles,
)
from gllm.kernels.attention_window import AttentionWindow
from gllm.models.stage import StageInputs
from gllm.runtime.worker.batch import Windows
from gllm.runtime.worker.cuda.staging import TreeLayout
from gllm.transport.device_streams import DeviceGraph, DeviceRuntime, DeviceStream

SMALL_SIZES = (1, 2, 4, 8)
"""Numbers of rows that are recorded in any case."""
SIZE_STEP = 8
"""Difference between larger numbers of rows."""
NUM_WARM_UPS = 2
"""Runs before a recording: libraries initialize in the first."""

Forward = Callable[[Any, Tensor | None], Tensor]
"""(inputs, activations of the previous stage or None) to activations or logits, on the device."""

CPU = torch.device("cpu")


def graph_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes for which CUDA graphs are captured, ascending, up to `max_rows`."""
    larger = range(SMALL_SIZES[-1] + SIZE_STEP, max_rows, SIZE_STEP)
    return [size for size in (*SMALL_SIZES, *larger) if size < max_rows] + [max_rows]


def find_graph_size(num_rows: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest captured batch size that holds the rows; None if all are too small.

    Args:
        num_rows: sequences of the decode step.
        sizes: captured batch sizes, ascending.
    """
    return next((size for size in sizes if size >= num_rows), None)


def pad_decodes(rows: PagedBatch, size: int, min_blocks: int = 1) -> PagedBatch:
    """Pad a decode step to the batch size of a CUDA graph, with rows of one token.

    Padding rows write to a KV block that no sequence uses.

    Args:
        rows: decode step with one token per row.
        size: number of rows to pad to.
        min_blocks: least number of columns of the block table.
    """
    used = len(rows.context_len)
    width = rows.block_table.shape[1]
    table = np.zeros((size, max(width, min_blocks)), dtype=rows.block_table.dtype)
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
class _RecordedGraph:
    """A graph and the memory that it reads."""

    graph: DeviceGraph
    memory: Tensor
    """[bytes] uint8: all inputs."""
    inputs: Any
    """The inputs as views of `memory`."""
    hidden: Tensor | None
    """[size, hidden]: activations of the previous stage."""


class DecodeGraphs:
    """CUDA graphs of a stage's decode steps, one per padded batch size.

    Capture, input copies and replay use one stream.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        stream: DeviceStream,
        get_block_table: Callable[[Any], Tensor | None],
    ) -> None:
        """Create an empty set of graphs.

        Args:
            runtime: device and its streams.
            stream: compute stream of the stage.
            get_block_table: returns the block table [rows, blocks] of inputs, which is the last of
                their tensors in memory; None for inputs of one fixed layout.
        """
        self._runtime, self._stream, self._get_block_table = runtime, stream, get_block_table
        self._recorded: dict[int, _RecordedGraph] = {}
        self._output: Tensor | None = None
        """[largest size, ...]: shared by all graphs, because logits are large."""

    def record(self, size: int, example: Any, hidden: Tensor | None, forward: Forward) -> None:
        """Record a graph; the largest size has to be recorded first.

        Args:
            size: number of rows.
            example: inputs on the host, padding in every row and block tables of the largest width.
                All later steps of this size have the same layout except for the block table.
            hidden: [size, hidden] on the device; None on the first stage.
            forward: the work to record.
        """
        layout, runtime = TreeLayout(example), self._runtime
        staged = runtime.allocate_pinned((layout.num_bytes,), torch.uint8)
        layout.fill(staged)
        memory = runtime.zeros((layout.num_bytes,), torch.uint8)
        inputs = layout.views(example, memory)
        with self._stream.current():
            memory.copy_(staged, non_blocking=True)
            for _ in range(NUM_WARM_UPS):
                forward(inputs, hidden)
        runtime.synchronize()

        def run() -> None:
            output = forward(inputs, hidden)
            if self._output is None:
                self._output = output
            else:
                self._output[:size].copy_(output)

        graph = runtime.capture(self._stream, run)
        self._recorded[size] = _RecordedGraph(graph, memory, inputs, hidden)

    def fill_inputs(self, size: int, inputs: Any, memory: Tensor, hidden: Tensor | None) -> Any:
        """Copy a step's inputs to a graph's memory. Has to be called within the stream.

        Args:
            size: rows of the graph.
            inputs: inputs of the step, on the device.
            memory: [bytes] uint8, begins with `inputs`.
            hidden: [rows, hidden], activations of the previous stage.

        Returns:
            The graph's own inputs.
        """
        recorded = self._recorded[size]
        table = self._get_block_table(inputs)
        graph_table = self._get_block_table(recorded.inputs)
        num_bytes = len(recorded.memory)
        if table is not None and graph_table is not None:
            num_bytes = int(graph_table.storage_offset()) * graph_table.itemsize
            assert num_bytes == table.storage_offset() * table.itemsize, "equal up to the table"
            graph_table[:, : table.shape[1]].copy_(table)
        recorded.memory[:num_bytes].copy_(memory[:num_bytes])
        if recorded.hidden is not None:
            assert hidden is not None, "a stage that is not the first needs activations"
            recorded.hidden[: len(hidden)].copy_(hidden)
            # Layers add to it in place: without this, padding would grow from step to step.
            recorded.hidden[len(hidden) :].zero_()
        return recorded.inputs

    def replay(self, size: int) -> Tensor:
        """Replay a graph. Has to be called within the stream.

        Returns:
            Its output [size, ...], valid until the next replay of any graph.
        """
        self._recorded[size].graph.replay()
        assert self._output is not None
        return self._output[:size]


def plan_table_attention(
    rows: PagedBatch,
    dtype: torch.dtype,
    windows: Windows,
    requested_tiles: set[int] | None = None,
    backend: str = "triton",
) -> dict[AttentionWindow, AttentionPlan]:
    """Plan attention for backends that read block tables directly, which CUDA graphs need.

    All plans share slots and block tables. Steps with equal numbers of rows, blocks per row and
    tokens have equal tensor shapes.

    Args:
        rows: query and context lengths and block tables of the step's sequences.
        dtype: dtype of queries; unused, block tables do not depend on it.
        windows: those of the stage's layers.
        requested_tiles: tile sizes of prefill chunks in tokens that kernels have requested. Kernels
            of the first computed step (the largest one, at start-up) add theirs; plans made with
            the same set include the tiles.
        backend: name of the attention backend.

    Returns:
        The plan of each window.
    """
    requested_tiles = set() if requested_tiles is None else requested_tiles
    slots, tables = torch.from_numpy(compute_slot_mapping(rows)), build_device_tables(rows, CPU)
    listed = {}
    if len(rows.context_len) > rows.num_decodes:
        # A copy: kernels add to the set on another thread.
        for num_tokens in tuple(requested_tiles):
            listed[num_tokens] = torch.from_numpy(list_prefill_tiles(rows, num_tokens))
    tables = replace(tables, prefill_tiles=listed, requested_tile_sizes=requested_tiles)
    plan = AttentionPlan(rows, slots, None, backend, tables=tables)
    return {window: replace(plan, window=window) for window in windows}


def get_block_table(inputs: StageInputs) -> Tensor | None:
    """Return the block table [rows, blocks] int32 of a step's inputs; None without tables.

    It is the only input whose width depends on the longest context.
    """
    tables = next(iter(inputs.attention.values())).tables
    return None if tables is None else tables.block_table
