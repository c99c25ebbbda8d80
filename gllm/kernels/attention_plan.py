"""Where in a paged KV cache the queries of a micro-batch look: from block tables to gathers.

Owns slots, groups and masks, made once for a step and shared by all layers that see alike. Does not
know models, requests and who owns the blocks.

A *slot* is a token's place in the cache, block * block_size + offset. The cache's last block is
never written and stays zero: gathers of padding go there, so that nothing (a NaN of another
sequence, say) leaks through a masked position.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gllm.kernels.native.library import native

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
class AttentionPlan:
    """What all layers of a step with the same window share."""

    rows: PagedRows
    slots: Tensor
    """[tokens] int64: where each token's key and value are stored."""
    window: int | None
    """Tokens that a token sees, itself among them; None: all."""
    gathers: Gathers | None
    """None where compiled kernels read the block tables themselves."""


def plan_attention(rows: PagedRows, dtype: torch.dtype, window: int | None = None) -> AttentionPlan:
    """Where the tokens of a step, of this compute dtype, are written and look."""
    tokens = np.diff(rows.query_start)
    spread = np.repeat(np.arange(len(tokens)), tokens)
    positions = np.arange(len(spread)) + (rows.context_len - rows.query_start[1:])[spread]
    size = rows.block_size
    written = rows.block_table[spread, positions // size] * size + positions % size
    is_native = native(torch.empty(0, dtype=dtype)) is not None
    gathers = None if is_native else _gathers(rows, dtype, window)
    return AttentionPlan(rows, torch.from_numpy(written), window, gathers)


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
    """`AttentionPlan.causal` for chunks."""
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
