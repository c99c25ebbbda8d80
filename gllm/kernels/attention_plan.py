"""Where in a paged KV cache the queries of a micro-batch look: from block tables to gathers.

Owns slots, groups and masks, made once for a step and shared by all layers that see alike, and the
tables that kernels on a device read. Does not know models, requests and who owns the blocks.

A *slot* is a token's place in the cache, block * block_size + offset. The cache's last block is
never written and stays zero: gathers of padding go there, so that nothing (a NaN of another
sequence, say) leaks through a masked position.
"""

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gllm.kernels.attention_backends import BACKENDS, usual_backend

Ints = npt.NDArray[np.int64]

GATHERED_TOKENS = 8192
"""Cached tokens gathered at once for decodes: a few MB, so that they are read back from cache."""
PADDED_SHARE = 0.25
"""Most padding in a group of decodes."""
QUERY_SLICE = 256
"""Prefill queries computed at once: a slice does not look at keys behind its own end."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes of similar context length, attended in one operation."""

    rows: Tensor
    """[group] int64, token rows."""
    slots: Tensor
    """[group * context] int64, padded to the longest context of the group."""
    bias: Tensor
    """[group, 1, 1, context] of the compute dtype: 0, or -inf at padding."""
    lengths: Tensor
    """[group] int64: context of each."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive tokens of one sequence."""

    first: int
    """Token row of its first token."""
    tokens: int
    slots: Tensor
    """[context] int64: the tokens that it sees, up to and with the chunk's last one."""


@dataclass(frozen=True, slots=True)
class Gathers:
    """Where each query looks, made for operations on gathered keys and values."""

    decodes: list[DecodeGroup]
    chunks: list[PrefillChunk]
    causal: Tensor
    """[queries, queries - 1 + keys] of the compute dtype, for the longest slice and context: 0 on
    and below the diagonal that starts at [0, keys - 1] and within the window, -inf elsewhere. The
    mask of any slice is a part of it."""


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows of a micro-batch in the cache, those of decodes first."""

    block_table: Ints
    """[rows, blocks]: block ids, padding arbitrary."""
    query_start: Ints
    """[rows + 1]: first token row of each row."""
    context_len: Ints
    """[rows]: tokens in the cache, this step's included."""
    num_decodes: int
    """Rows at the beginning that have one token each."""
    block_size: int
    num_blocks: int
    """Usable blocks, the zero block excluded."""

    def slots(self, row: int, begin: int) -> Ints:
        """Slots of a row's context from position `begin` on."""
        positions = np.arange(begin, self.context_len[row])
        blocks = self.block_table[row, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size


@dataclass(frozen=True, slots=True)
class DeviceTables:
    """`PagedRows` where kernels read it: parts of one int32 buffer, so that one copy brings all.

    On the host too, to be copied from.
    """

    buffer: Tensor
    """[rows + (rows + 1) + rows * blocks] int32: what follows, one behind the other."""
    context_len: Tensor
    """[rows] int32; 0 for rows without a sequence."""
    query_start: Tensor
    """[rows + 1] int32."""
    block_table: Tensor
    """[rows, blocks] int32: block ids, padding arbitrary."""
    listed: dict[int, Tensor] = field(default_factory=dict)
    """[tiles, 2] int32: `prefill_tiles` by their number of tokens, as far as they were made."""
    asked: set[int] = field(default_factory=set)
    """Numbers of tokens that kernels asked for, maybe of several steps: to make those ahead."""
    _derived: dict[Hashable, Tensor] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """What the first layer that asks for a key makes of the tables, for all layers."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]

    def tiles(self, rows: PagedRows, tokens: int) -> Tensor:
        """`prefill_tiles` on the tables' device, made once for each number of tokens."""
        self.asked.add(tokens)
        if tokens not in self.listed:
            found = torch.from_numpy(prefill_tiles(rows, tokens))
            self.listed[tokens] = upload(found, self.buffer.device)
        return self.listed[tokens]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of a step with the same window share."""

    rows: PagedRows
    slots: Tensor
    """[tokens] int64: where each token's key and value are stored."""
    window: int | None
    """Tokens that a token sees, itself among them; None: all."""
    backend: str
    """Computes attention; a name of attention_backends.BACKENDS, which says what it reads."""
    gathers: Gathers | None = None
    """For backends that read them."""
    tables: DeviceTables | None = None
    """For backends that read them, on the device of the step's tensors."""


def plan_attention(
    rows: PagedRows,
    dtype: torch.dtype,
    window: int | None = None,
    device: torch.device | None = None,
    backend: str | None = None,
) -> AttentionPlan:
    """Where the tokens of a step, of this compute dtype, are written and look.

    device: of slots and tables, default the CPU; gathers are made on the host. backend: default
    what is usual for this dtype there. Plans of other windows for a backend that reads tables
    differ in `window` alone: `dataclasses.replace` makes them without another copy of the tables.
    """
    device = device or torch.device("cpu")
    backend = backend or usual_backend(dtype, device)
    slots = upload(torch.from_numpy(written_slots(rows)), device)
    gathers = tables = None
    match BACKENDS[backend].reads:
        case "gathers":
            gathers = _gathers(rows, dtype, window)
        case "tables":
            tables = device_tables(rows, device)
    return AttentionPlan(rows, slots, window, backend, gathers, tables)


def written_slots(rows: PagedRows) -> Ints:
    """[tokens]: where each token's key and value are stored."""
    tokens = np.diff(rows.query_start)
    spread = np.repeat(np.arange(len(tokens)), tokens)
    positions = np.arange(len(spread)) + (rows.context_len - rows.query_start[1:])[spread]
    size = rows.block_size
    return rows.block_table[spread, positions // size] * size + positions % size


def device_tables(rows: PagedRows, device: torch.device) -> DeviceTables:
    """The tables of a step on a device; the copy does not wait."""
    count, blocks = rows.block_table.shape
    host = empty_tables(count, blocks, torch.device("cpu"), device.type == "cuda")
    fill_tables(rows, host)
    return _views(upload(host.buffer, device), count, blocks)


def empty_tables(
    rows: int, blocks: int, device: torch.device, pinned: bool = False
) -> DeviceTables:
    """Tables with room for so many rows and blocks, unwritten; pinned: host memory that a device
    copies from without waiting."""
    size = rows + rows + 1 + rows * blocks
    buffer = torch.empty(size, dtype=torch.int32, device=device, pin_memory=pinned)
    return _views(buffer, rows, blocks)


def fill_tables(rows: PagedRows, tables: DeviceTables) -> None:
    """Write a micro-batch to tables on the host that may have room for more rows and blocks.

    Rows beyond it have neither tokens nor context; block ids beyond it stay as they are.
    """
    used, blocks = rows.block_table.shape
    tables.context_len[:used] = torch.from_numpy(rows.context_len)
    tables.context_len[used:] = 0
    tables.query_start[: used + 1] = torch.from_numpy(rows.query_start)
    tables.query_start[used + 1 :] = int(rows.query_start[-1])
    tables.block_table[:used, :blocks] = torch.from_numpy(rows.block_table)


def prefill_tiles(rows: PagedRows, tokens: int) -> npt.NDArray[np.int32]:
    """[tiles, 2]: row and first token within the row, for tiles of so many tokens of the rows
    behind the decodes. Tiles that see most come first, so that short ones fill what they leave."""
    counts = np.diff(rows.query_start)[rows.num_decodes :]
    tiles = -(-counts // tokens)
    owner = np.repeat(np.arange(len(counts)), tiles)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tokens
    seen = (rows.context_len[rows.num_decodes :] - counts)[owner] + first
    order = np.argsort(-seen, kind="stable")
    return np.stack((owner + rows.num_decodes, first), axis=1)[order].astype(np.int32)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device; the copy to a GPU does not wait."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _views(buffer: Tensor, rows: int, blocks: int) -> DeviceTables:
    context_len, query_start, block_table = buffer.split((rows, rows + 1, rows * blocks))
    return DeviceTables(buffer, context_len, query_start, block_table.view(rows, blocks))


def _gathers(rows: PagedRows, dtype: torch.dtype, window: int | None) -> Gathers:
    chunks = []
    for row in range(rows.num_decodes, len(rows.context_len)):
        first = int(rows.query_start[row])
        count = int(rows.query_start[row + 1]) - first
        begin = int(rows.context_len[row]) - count - (window or 0) + 1
        slots = torch.from_numpy(rows.slots(row, max(begin, 0) if window else 0))
        chunks.append(PrefillChunk(first, count, slots))
    causal = _causal_template(chunks, dtype, window)
    return Gathers(_decode_groups(rows, dtype, window), chunks, causal)


def _decode_groups(rows: PagedRows, dtype: torch.dtype, window: int | None) -> list[DecodeGroup]:
    context = rows.context_len[: rows.num_decodes]
    seen = context if window is None else np.minimum(context, window)
    begin = context - seen
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


def _causal_template(chunks: list[PrefillChunk], dtype: torch.dtype, window: int | None) -> Tensor:
    """Return the mask of `Gathers.causal` for chunks."""
    keys = max((len(chunk.slots) for chunk in chunks), default=1)
    queries = min(max((chunk.tokens for chunk in chunks), default=1), QUERY_SLICE)
    shape = (queries, queries - 1 + keys)
    causal = torch.full(shape, -math.inf, dtype=dtype).triu_(keys)
    if window is not None:
        # Query r's own key is in column keys - 1 + r; it sees `window` columns up to there.
        too_old = torch.ones(shape, dtype=torch.bool).tril_(keys - 1 - window)
        causal.masked_fill_(too_old, -math.inf)
    return causal


def _group_decodes(context_len: Ints) -> Iterator[Ints]:
    """Rows of decodes in groups that neither gather nor pad too much; each row in one of them."""
    order = np.argsort(-context_len, kind="stable")
    lengths = context_len[order]
    begin = 0
    while begin < len(order):
        fits = max(GATHERED_TOKENS // int(lengths[begin]), 1)
        alike = int((lengths[begin:] >= lengths[begin] * (1 - PADDED_SHARE)).sum())
        end = begin + min(fits, alike)
        yield order[begin:end]
        begin = end
