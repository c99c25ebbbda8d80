"""Sorting of tokens by expert, and division into blocks of rows of one expert.

The grid has as many programs as there can be blocks, because the host does not read which experts
were selected; programs beyond the last block have no rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.triton.activation import gate


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """(token, selected expert) pairs of a batch, sorted by expert, for grouped matrix products.

    A token has one pair for each expert that it selects.
    """

    order: Tensor
    """[pairs] int64: indices of the pairs, token * top_k + i, sorted by expert."""
    bounds: Tensor
    """[experts + 1] int64: index in `order` of each expert's first pair; the last is the end."""
    top_k: int
    """Number of experts per token."""

    def blocks(self, rows: int) -> int:
        """Return the largest possible number of blocks of `rows` rows, which sets the launch grid.

        Each selected expert has at most one block that is not full.
        """
        pairs = len(self.order)
        return min(pairs, len(self.bounds) - 1) + pairs // rows

    def constants(self) -> dict[str, int]:
        """Return the compile-time constants of kernels that read the sorted pairs."""
        return expert_constants(len(self.bounds) - 1, self.top_k)


def expert_constants(experts: int, top_k: int) -> dict[str, int]:
    """Return the compile-time constants of the MoE kernels.

    Args:
        experts: number of experts.
        top_k: number of experts per token.
    """
    block = int(triton.next_power_of_2(experts))
    return {"TOP_K": top_k, "EXPERTS": experts, "EXPERTS_BLOCK": block}


def expert_lookup_sizes(gate: str, element: int) -> dict[str, int]:
    """Return the problem sizes by which `choose_tiles` selects tile sizes of the expert kernels.

    These are the number of projections in one launch and the bytes per element of x.

    Args:
        gate: name of the gate's activation, "" for the down projection.
        element: bytes per element of x.
    """
    return {"maps": 2 if gate else 1, "bytes": element}


def sort_by_expert(experts: Tensor, count: int) -> SortedPairs:
    """Sort the (token, expert) pairs of a batch by expert.

    Args:
        experts: [tokens, top_k] int64: ids of the selected experts, below `count`.
        count: number of experts.
    """
    numbers, order = experts.flatten().sort(stable=True)
    bounds = torch.searchsorted(numbers, torch.arange(count + 1, device=experts.device))
    return SortedPairs(order, bounds, experts.shape[1])


@triton.jit
def find_block(
    block, order, bounds,
    EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the expert of a block of rows, and the index, validity and pair of each row [ROWS].

    A block has up to ROWS (token, expert) pairs of one expert; the expert is EXPERTS if there is no
    such block. order [pairs] and bounds [experts + 1] int64 are those of SortedPairs. Triton device
    function.
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
def block_rows(row, pair, TOP_K: tl.constexpr, GATE: tl.constexpr):
    """Return the row to read and the row to write for each row of a block, both [ROWS].

    With a GATE (first projection) rows are read in token order and written in sorted order. Without
    one (down projection) they are read in sorted order and written in the order of (token, expert)
    pairs. Triton device function.
    """
    source = row
    to = pair
    if GATE != "":
        source = pair // TOP_K
        to = row
    return source, to


@triton.jit
def add_biases(
    total, other, bias, expert, column,
    OUTPUTS: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Add an expert's biases to a tile of its outputs; return total and other, [ROWS, COLUMNS].

    bias: [experts, OUTPUTS], or with a GATE [experts, 2 * OUTPUTS], the gates' first; without BIAS
    nothing is added. Triton device function.
    """
    if BIAS:
        maps: tl.constexpr = 2 if GATE != "" else 1
        own = bias + expert.to(tl.int64) * (maps * OUTPUTS) + column
        total += tl.load(own, column < OUTPUTS, 0.0).to(tl.float32)[None, :]
        if GATE != "":
            other += tl.load(own + OUTPUTS, column < OUTPUTS, 0.0).to(tl.float32)[None, :]
    return total, other


@triton.jit
def store_tile(total, other, output, to, column, there, OUTPUTS: tl.constexpr, GATE: tl.constexpr):
    """Store a tile [ROWS, COLUMNS] of an expert's output, with the gated activation if GATE is set.

    total, other [ROWS, COLUMNS] float32: products with the gate and the up projection. With a GATE,
    the name of an activation, the result is act(total) * other, else total. It goes to rows `to`
    [ROWS] and columns [COLUMNS] of output. there [ROWS]: validity of the rows. Triton device
    function.
    """
    if GATE != "":
        # As the reference, which gates what it has rounded.
        kind = output.dtype.element_ty
        gates = total.to(kind).to(tl.float32)
        total = gate(gates, other.to(kind).to(tl.float32), GATE)
    at = output + to.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    within = there[:, None] & (column < OUTPUTS)[None, :]
    tl.store(at, total.to(output.dtype.element_ty), within)
