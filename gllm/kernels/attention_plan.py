"""Attention metadata of a step: slot mapping, gather indices, masks and block tables on the device.

A plan is built once per step and shared by all layers with the same attention window.

A *slot* is the position of a token in the cache, block * block_size + offset. The last block of the
cache is never written and stays zero: padded gather indices point to it, so that no NaN of another
sequence leaks through a masked position.
"""

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gllm.kernels.attention_backends import BACKENDS, default_backend
from gllm.kernels.attention_window import AttentionChunk, AttentionWindow, SymmetricWindow

Ints = npt.NDArray[np.int64]

GATHERED_TOKENS = 8192
"""Most cached tokens gathered at once for decodes: a few MB, which stay in the CPU cache."""
PADDED_SHARE = 0.25
"""Largest fraction of padding within a group of decodes."""
QUERY_SLICE = 256
"""Prefill queries per matrix product: a slice does not read keys after its last query."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode sequences of similar context length whose attention is computed as a padded batch."""

    rows: Tensor
    """[group] int64: index of each sequence's token in the step's batch of tokens."""
    slots: Tensor
    """[group * context] int64: KV-cache slots of the context tokens, padded to the longest context
    of the group."""
    bias: Tensor
    """[group, 1, 1, context] of the compute dtype: 0, or -inf at padding."""
    lengths: Tensor
    """[group] int64: context length of each decode."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Position in the batch and KV-cache slots of the prefill tokens of one sequence in a step.

    Tokens whose windows begin at chunks of attention are divided there.
    """

    first: int
    """Index of the chunk's first token in the step's batch of tokens."""
    tokens: int
    """Number of tokens of the chunk."""
    slots: Tensor
    """[context] int64: slots of the visible tokens, the last one of the chunk included."""


@dataclass(frozen=True, slots=True)
class GatherIndices:
    """Indices and masks for the torch backend, which gathers keys and values from the KV cache."""

    decodes: list[DecodeGroup]
    """Decodes of the step, grouped by context length."""
    chunks: list[PrefillChunk]
    """Prefill tokens of the step, one or more chunks per sequence."""
    causal: Tensor
    """[queries, queries - 1 + keys] of the compute dtype, for the longest slice and context: 0 on
    and below the diagonal that starts at [0, keys - 1] and within the window, -inf elsewhere. The
    mask of any slice is a view of it."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Block tables and lengths of the sequences of a micro-batch, as numpy arrays.

    Each sequence is one row of the arrays. Decodes come first.
    """

    block_table: Ints
    """[rows, blocks]: block ids, padding arbitrary."""
    query_start: Ints
    """[rows + 1]: index of each row's first token in the batch of tokens; the last entry is the
    number of tokens."""
    context_len: Ints
    """[rows]: tokens in the cache, those of this step included."""
    num_decodes: int
    """Number of leading rows with one token each."""
    block_size: int
    """Tokens per KV block."""
    num_blocks: int
    """Number of usable blocks, without the zero block."""

    def slots(self, row: int, begin: int, end: int) -> Ints:
        """Return the KV-cache slots of a sequence's positions from `begin` up to `end`."""
        positions = np.arange(begin, end)
        blocks = self.block_table[row, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size


@dataclass(frozen=True, slots=True)
class DeviceBlockTables:
    """Copy of a `PagedBatch` on a GPU: block tables and lengths as views of one int32 buffer.

    One copy of the buffer transfers all of them. The source of the copy is another instance in host
    memory.
    """

    buffer: Tensor
    """[rows + (rows + 1) + rows * blocks] int32: the following three tensors, concatenated."""
    context_len: Tensor
    """[rows] int32: context length, 0 for rows without a sequence."""
    query_start: Tensor
    """[rows + 1] int32: first token row of each row."""
    block_table: Tensor
    """[rows, blocks] int32: block ids, padding arbitrary."""
    prefill_tiles: dict[int, Tensor] = field(default_factory=dict)
    """[tiles, 2] int32 per number of tokens of a tile: cached results of `list_prefill_tiles`."""
    requested_tile_sizes: set[int] = field(default_factory=set)
    """Numbers of tokens per tile that kernels requested, possibly shared by several steps: lets the
    next step list those tiles in advance."""
    _derived: dict[Hashable, Tensor] = field(default_factory=dict)

    def get_or_compute(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """Return the cached tensor for a key; the first layer that needs it computes it."""
        if key not in self._derived:
            self._derived[key] = compute()
        return self._derived[key]

    def get_prefill_tiles(self, rows: PagedBatch, num_tokens: int) -> Tensor:
        """Return the result of `list_prefill_tiles` as a device tensor, cached per num_tokens."""
        self.requested_tile_sizes.add(num_tokens)
        if num_tokens not in self.prefill_tiles:
            tiles = torch.from_numpy(list_prefill_tiles(rows, num_tokens))
            self.prefill_tiles[num_tokens] = copy_plan_to_device(tiles, self.buffer.device)
        return self.prefill_tiles[num_tokens]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Attention metadata of a step, shared by all layers with the same window."""

    rows: PagedBatch
    """Block tables and lengths of the sequences, in host memory."""
    slots: Tensor
    """[tokens] int64: slot that the key and value of each token are written to."""
    window: AttentionWindow
    """Keys that a token attends to; None for all up to its own position."""
    backend: str
    """Name of the attention backend, a key of attention_backends.BACKENDS."""
    gathers: GatherIndices | None = None
    """Input of backends whose `reads` is "gathers"; None for others."""
    tables: DeviceBlockTables | None = None
    """Input of backends whose `reads` is "tables", on the device of the step; None for others."""


def plan_attention(
    rows: PagedBatch,
    dtype: torch.dtype,
    window: AttentionWindow = None,
    device: torch.device | None = None,
    backend: str | None = None,
) -> AttentionPlan:
    """Build the attention metadata of a step for one attention backend.

    The GPU backends read `AttentionPlan.tables`. Their plans for several windows differ only in
    `window`: `dataclasses.replace` creates them without copying the tables again.

    Args:
        rows: Block tables and lengths of the micro-batch.
        dtype: Compute dtype, which is also that of the masks.
        window: Tokens visible to a token.
        device: Device of the slots and block tables, by default the CPU. Gather indices are on the
            host.
        backend: Name of the backend, by default `default_backend(dtype, device)`.
    """
    device = device or torch.device("cpu")
    backend = backend or default_backend(dtype, device)
    slots = copy_plan_to_device(torch.from_numpy(compute_slot_mapping(rows)), device)
    gathers = tables = None
    match BACKENDS[backend].reads:
        case "gathers":
            gathers = _gathers(rows, dtype, window)
        case "tables":
            tables = build_device_tables(rows, device)
    return AttentionPlan(rows, slots, window, backend, gathers, tables)


def find_oldest_visible(positions: Ints, window: AttentionWindow) -> Ints:
    """Return the position of the first token that each of the tokens at `positions` sees."""
    if window is None:
        return np.zeros_like(positions)
    if isinstance(window, AttentionChunk):
        return positions // window.size * window.size
    size = window.size if isinstance(window, SymmetricWindow) else window
    return np.zeros_like(positions) if size is None else np.maximum(positions - size + 1, 0)


def compute_slot_mapping(rows: PagedBatch) -> Ints:
    """Return the KV-cache slot of each token of a micro-batch, [tokens].

    The key and value of the token are written to this slot: block id * block_size + offset.
    """
    tokens = np.diff(rows.query_start)
    spread = np.repeat(np.arange(len(tokens)), tokens)
    positions = np.arange(len(spread)) + (rows.context_len - rows.query_start[1:])[spread]
    size = rows.block_size
    return rows.block_table[spread, positions // size] * size + positions % size


def build_device_tables(rows: PagedBatch, device: torch.device) -> DeviceBlockTables:
    """Copy the block tables and lengths of a micro-batch to a device, asynchronously to a GPU."""
    count, blocks = rows.block_table.shape
    host = allocate_device_tables(count, blocks, torch.device("cpu"), device.type == "cuda")
    write_device_tables(rows, host)
    return _views(copy_plan_to_device(host.buffer, device), count, blocks)


def allocate_device_tables(
    rows: int, blocks: int, device: torch.device, pinned: bool = False
) -> DeviceBlockTables:
    """Allocate uninitialized block tables for a maximum number of sequences and of blocks.

    Args:
        rows: number of sequences.
        blocks: number of KV blocks per sequence.
        device: device of the tensors.
        pinned: True allocates page-locked host memory, for asynchronous copies to a GPU.
    """
    size = rows + rows + 1 + rows * blocks
    buffer = torch.empty(size, dtype=torch.int32, device=device, pin_memory=pinned)
    return _views(buffer, rows, blocks)


def write_device_tables(rows: PagedBatch, tables: DeviceBlockTables) -> None:
    """Write the block tables and lengths of a micro-batch to preallocated tables in host memory.

    The tables may have more rows and more blocks per row. Additional rows get no tokens and no
    context; additional block ids are not written.
    """
    used, blocks = rows.block_table.shape
    tables.context_len[:used] = torch.from_numpy(rows.context_len)
    tables.context_len[used:] = 0
    tables.query_start[: used + 1] = torch.from_numpy(rows.query_start)
    tables.query_start[used + 1 :] = int(rows.query_start[-1])
    tables.block_table[:used, :blocks] = torch.from_numpy(rows.block_table)


def list_prefill_tiles(rows: PagedBatch, tokens: int) -> npt.NDArray[np.int32]:
    """List the query tiles of all prefill chunks, [tiles, 2]: sequence, first token in its chunk.

    A tile has up to `tokens` tokens of one sequence. Tiles with the most visible keys come first,
    so that short tiles fill the GPU at the end of the launch.
    """
    counts = np.diff(rows.query_start)[rows.num_decodes :]
    tiles = -(-counts // tokens)
    owner = np.repeat(np.arange(len(counts)), tiles)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tokens
    seen = (rows.context_len[rows.num_decodes :] - counts)[owner] + first
    order = np.argsort(-seen, kind="stable")
    return np.stack((owner + rows.num_decodes, first), axis=1)[order].astype(np.int32)


def copy_plan_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from host memory to a device, asynchronously if it is a GPU."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _views(buffer: Tensor, rows: int, blocks: int) -> DeviceBlockTables:
    context_len, query_start, block_table = buffer.split((rows, rows + 1, rows * blocks))
    return DeviceBlockTables(buffer, context_len, query_start, block_table.view(rows, blocks))


def _gathers(rows: PagedBatch, dtype: torch.dtype, window: AttentionWindow) -> GatherIndices:
    starts = rows.context_len - np.diff(rows.query_start)
    oldest = find_oldest_visible(starts, window)
    chunks = []
    for row in range(rows.num_decodes, len(rows.context_len)):
        first, end = int(rows.query_start[row] - starts[row]), int(rows.context_len[row])
        size = window.size if isinstance(window, AttentionChunk) else end
        begin, visible = int(starts[row]), int(oldest[row])
        while begin < end:
            border = min(begin // size * size + size, end)
            slots = torch.from_numpy(rows.slots(row, visible, border))
            chunks.append(PrefillChunk(first + begin, border - begin, slots))
            begin = visible = border
    causal = _causal_template(chunks, dtype, window)
    return GatherIndices(_decode_groups(rows, dtype, window), chunks, causal)


def _decode_groups(
    rows: PagedBatch, dtype: torch.dtype, window: AttentionWindow
) -> list[DecodeGroup]:
    context = rows.context_len[: rows.num_decodes]
    begin = find_oldest_visible(context - 1, window)
    seen = context - begin
    longest = np.arange(int(seen.max(initial=0)))
    groups = []
    for members in _group_decodes(seen):
        keys = longest[: seen[members].max()]
        padding = keys >= seen[members][:, None]
        positions = np.where(padding, 0, begin[members][:, None] + keys)
        blocks = np.take_along_axis(rows.block_table[members], positions // rows.block_size, axis=1)
        slots = blocks * rows.block_size + positions % rows.block_size
        slots[padding] = rows.num_blocks * rows.block_size
        bias = torch.zeros(padding.shape, dtype=dtype)
        bias.masked_fill_(torch.from_numpy(padding), -math.inf)
        group = DecodeGroup(
            torch.from_numpy(members),
            torch.from_numpy(slots.reshape(-1)),
            bias[:, None, None],
            torch.from_numpy(seen[members]),
        )
        groups.append(group)
    return groups


def _causal_template(
    chunks: list[PrefillChunk], dtype: torch.dtype, window: AttentionWindow
) -> Tensor:
    """Return the mask `GatherIndices.causal` for the chunks."""
    keys = max((len(chunk.slots) for chunk in chunks), default=1)
    queries = min(max((chunk.tokens for chunk in chunks), default=1), QUERY_SLICE)
    shape = (queries, queries - 1 + keys)
    causal = torch.full(shape, -math.inf, dtype=dtype).triu_(keys)
    if isinstance(window, int):
        # Query r's own key is in column keys - 1 + r; it sees `window` columns up to there.
        too_old = torch.ones(shape, dtype=torch.bool).tril_(keys - 1 - window)
        causal.masked_fill_(too_old, -math.inf)
    return causal


def _group_decodes(context_len: Ints) -> Iterator[Ints]:
    """Yield groups of decode rows within GATHERED_TOKENS and PADDED_SHARE; each row once."""
    order = np.argsort(-context_len, kind="stable")
    lengths = context_len[order]
    begin = 0
    while begin < len(order):
        fits = max(GATHERED_TOKENS // int(lengths[begin]), 1)
        alike = int((lengths[begin:] >= lengths[begin] * (1 - PADDED_SHARE)).sum())
        end = begin + min(fits, alike)
        yield order[begin:end]
        begin = end
