"""Sorting of tokens by expert, and division into blocks of rows of one expert.

The grid has as many programs as there can be blocks, because the host does not read which experts
were selected; programs beyond the last block have no rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.triton.activation import activate


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """(token, selected expert) pairs, sorted by expert; a token has one per expert it selects."""

    order: Tensor
    """[pairs] int64: indices of the pairs, token * picked + i, sorted by expert."""
    bounds: Tensor
    """[experts + 1] int64: index in `order` of each expert's first pair; the last is the end."""
    picked: int
    """Number of experts that a token selects."""

    def blocks(self, rows: int) -> int:
        """Return the largest possible number of blocks of `rows` rows.

        Each selected expert has at most one block that is not full.
        """
        pairs = len(self.order)
        return min(pairs, len(self.bounds) - 1) + pairs // rows

    def constants(self) -> dict[str, int]:
        """Return the compile-time constants of the sort."""
        return expert_constants(len(self.bounds) - 1, self.picked)


def expert_constants(experts: int, picked: int) -> dict[str, int]:
    """Return the constants for a number of experts and of selected experts per token."""
    block = int(triton.next_power_of_2(experts))
    return {"PICKED": picked, "EXPERTS": experts, "EXPERTS_BLOCK": block}


def tile_sizes(gate: str, element: int) -> dict[str, int]:
    """Return the problem sizes for `choose_tiles`: projections, bytes per element of x."""
    return {"maps": 2 if gate else 1, "bytes": element}


def sort_by_expert(experts: Tensor, count: int) -> SortedPairs:
    """Sort (token, expert) pairs by expert; experts [tokens, picked] int64, ids below `count`."""
    numbers, order = experts.flatten().sort(stable=True)
    bounds = torch.searchsorted(numbers, torch.arange(count + 1, device=experts.device))
    return SortedPairs(order, bounds, experts.shape[1])


@triton.jit
def find_block(
    block, order, bounds,
    EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return a block's expert, and per row [ROWS] its index, validity and pair.

    The expert is EXPERTS if there is no such block. order [pairs] and bounds [experts + 1] int64:
    see SortedPairs.
    """
    number = tl.arange(0, EXPERTS_BLOCK)
    begins = tl.load(bounds + number, number < EXPERTS, 0)
    ends = tl.load(bounds + number + 1, number < EXPERTS, 0)
    blocks = (ends - begins + ROWS - 1) // ROWS
    last = tl.cumsum(blocks, 0)
    expert = tl.sum((last <= block).to(tl.int32), 0)
    firsts = begins + (block - (last - blocks)) * ROWS
    first = tl.sum(tl.where(number == expert, firsts, 0), 0)
    end = tl.sum(tl.where(number == expert, ends, 0), 0)
    row = first + tl.arange(0, ROWS)
    there = (row < end) & (expert < EXPERTS)
    return expert, row, there, tl.load(order + row, there, 0)


@triton.jit
def block_rows(row, pair, PICKED: tl.constexpr, GATE: tl.constexpr):
    """Return the row that is read and the one that is written, each [ROWS], for a block's rows.

    With a GATE rows are read at tokens and written in sorted order; without they are read in
    sorted order and written by pairs.
    """
    source = row
    to = pair
    if GATE != "":
        source = pair // PICKED
        to = row
    return source, to


@triton.jit
def store_tile(total, other, output, to, column, there, OUTPUTS: tl.constexpr, GATE: tl.constexpr):
    """Write a tile [ROWS, COLUMNS] to rows `to` [ROWS] and columns [COLUMNS] of output.

    total, other [ROWS, COLUMNS] float32. With a GATE the result is act(total) * other, else total.
    there [ROWS]: validity of the rows.
    """
    if GATE != "":
        # As the reference, which gates what it has rounded.
        kind = output.dtype.element_ty
        gates = total.to(kind).to(tl.float32)
        total = activate(gates, GATE) * other.to(kind).to(tl.float32)
    at = output + to.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    within = there[:, None] & (column < OUTPUTS)[None, :]
    tl.store(at, total.to(output.dtype.element_ty), within)
