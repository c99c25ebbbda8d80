"""What experts compute, for GPUs, without the host hearing which experts were picked.

Owns how tokens are put together: sorted by expert, and cut into blocks of one expert each. There
are as many programs as blocks could become at most; those beyond the last block end at once. The
size of blocks is always the same, and a token's parts are added in the order of its experts'
numbers, so what a token becomes does not depend on its batch. The formula is in
gllm/kernels/experts.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.triton.activation import KINDS, activated
from gllm.kernels.triton.ahead import Compiled
from gllm.kernels.triton.common import dot

ROWS = 64
"""Of a block: the fewest that Hopper's tensor cores multiply by one instruction."""
INNER = 64
"""Elements of the inner dimension that are multiplied at once."""
COLUMNS = 64
"""Outputs of a program where it has two accumulators; twice as many where it has one."""
SUMMED = 512
"""Elements of a token that a program adds up."""


@triton.jit
def _multiply(
    x,
    weight,
    output,
    order,
    bounds,
    x_row,
    PICKED: tl.constexpr,
    GATE: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """One tile of a block's rows times their expert's weight.

    order [rows]: (token, place) pairs, as numbers, sorted by expert; bounds [EXPERTS + 1]: where
    each expert's begin in it. With a GATE: weight [EXPERTS, 2 * OUTPUTS, INPUTS], x
    [tokens, INPUTS] is read at tokens, PICKED places each, and output [rows, OUTPUTS] is in sorted
    order. Without: weight [EXPERTS, OUTPUTS, INPUTS], x [rows, INPUTS] is in sorted order, output
    [rows, OUTPUTS] by pairs.
    """
    block = tl.program_id(1)
    number = tl.arange(0, EXPERTS_BLOCK)
    begins = tl.load(bounds + number, number < EXPERTS, 0)
    ends = tl.load(bounds + number + 1, number < EXPERTS, 0)
    blocks = (ends - begins + ROWS - 1) // ROWS
    last = tl.cumsum(blocks, 0)
    expert = tl.sum((last <= block).to(tl.int32), 0)
    if expert < EXPERTS:
        firsts = begins + (block - (last - blocks)) * ROWS
        first = tl.sum(tl.where(number == expert, firsts, 0), 0)
        end = tl.sum(tl.where(number == expert, ends, 0), 0)
        row = first + tl.arange(0, ROWS)
        there = row < end
        pair = tl.load(order + row, there, 0)
        source = row
        to = pair
        if GATE != "":
            source = pair // PICKED
            to = row
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        known = column < OUTPUTS
        maps: tl.constexpr = 2 if GATE != "" else 1
        weights = weight + expert.to(tl.int64) * (maps * OUTPUTS * INPUTS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        other = tl.zeros((ROWS, COLUMNS), tl.float32)
        for begin in range(0, INPUTS, INNER):
            inner = begin + tl.arange(0, INNER)
            within = inner < INPUTS
            left_at = x + source.to(tl.int64)[:, None] * x_row + inner[None, :]
            left = tl.load(left_at, there[:, None] & within[None, :], 0.0)
            right_at = weights + column[None, :] * INPUTS + inner[:, None]
            right_there = within[:, None] & known[None, :]
            total = dot(left, tl.load(right_at, right_there, 0.0), total)
            if GATE != "":
                right = tl.load(right_at + OUTPUTS * INPUTS, right_there, 0.0)
                other = dot(left, right, other)
        if GATE != "":
            # As the reference, which gates what it has rounded.
            kind = output.dtype.element_ty
            gates = total.to(kind).to(tl.float32)
            total = activated(gates, GATE) * other.to(kind).to(tl.float32)
        at = output + to.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
        tl.store(at, total.to(output.dtype.element_ty), there[:, None] & known[None, :])


@triton.jit
def _add(
    parts,
    experts,
    weights,
    output,
    HIDDEN: tl.constexpr,
    PICKED: tl.constexpr,
    PICKED_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """parts [tokens, PICKED, HIDDEN], experts and weights [tokens, PICKED]; output
    [tokens, HIDDEN]: the weighted sum by rising number of the expert."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, PICKED_BLOCK)
    own = tl.load(experts + token * PICKED + place, place < PICKED, 1 << 30)
    share = tl.load(weights + token * PICKED + place, place < PICKED, 0.0).to(tl.float32)
    before = (own[None, :] < own[:, None]) | (
        (own[None, :] == own[:, None]) & (place[None, :] < place[:, None])
    )
    rank = tl.sum(before.to(tl.int32), 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for turn in range(PICKED):
        which = tl.sum(tl.where(rank == turn, place, 0), 0)
        factor = tl.sum(tl.where(rank == turn, share, 0.0), 0)
        at = parts + (token * PICKED + which) * HIDDEN + column
        total += tl.load(at, column < HIDDEN, 0.0).to(tl.float32) * factor
    tl.store(output + token * HIDDEN + column, total.to(output.dtype.element_ty), column < HIDDEN)


def run_experts(
    x: Tensor, experts: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """As gllm.kernels.experts.run_stacked: x [tokens, hidden], experts and weights
    [tokens, active], up [experts, 2 * inner, hidden], down [experts, hidden, inner]; the result is
    like x."""
    if activation not in KINDS:
        raise ValueError(f"no kernel for the activation {activation!r}")
    tokens, hidden = x.shape
    count, _, inner = down.shape
    picked = experts.shape[1]
    output = x.new_empty(tokens, hidden)
    if not tokens:
        return output
    x = x if x.stride(1) == 1 else x.contiguous()
    experts, weights = experts.contiguous(), weights.contiguous()
    numbers, order = experts.flatten().sort(stable=True)
    bounds = torch.searchsorted(numbers, torch.arange(count + 1, device=x.device))
    gated, parts = x.new_empty(len(order), inner), x.new_empty(len(order), hidden)
    # Each expert that was picked has at most one block that is not full.
    blocks = min(len(order), count) + len(order) // ROWS
    for source, weight, to, gate in ((x, up, gated, activation), (gated, down, parts, "")):
        constants = _constants(source.shape[1], to.shape[1], count, picked, gate)
        grid = (triton.cdiv(to.shape[1], constants["COLUMNS"]), blocks)
        tensors = (source, weight, to, order, bounds)
        _multiply[grid](*tensors, source.stride(0), **constants, **_options(x.element_size()))
    constants = _sums(hidden, picked)
    _add[(tokens, triton.cdiv(hidden, SUMMED))](parts, experts, weights, output, **constants)
    return output


def _options(element_size: int) -> dict[str, int]:
    """Tiles in float32 are twice as large."""
    return {"num_warps": 4, "num_stages": 3 if element_size == 2 else 2}


def _constants(inputs: int, outputs: int, count: int, picked: int, gate: str) -> dict[str, Any]:
    return {
        "PICKED": picked,
        "GATE": gate,
        "INPUTS": inputs,
        "OUTPUTS": outputs,
        "EXPERTS": count,
        "EXPERTS_BLOCK": triton.next_power_of_2(count),
        "ROWS": ROWS,
        "COLUMNS": COLUMNS if gate else 2 * COLUMNS,
        "INNER": INNER,
    }


def _sums(hidden: int, picked: int) -> dict[str, int]:
    block = triton.next_power_of_2(picked)
    return {"HIDDEN": hidden, "PICKED": picked, "PICKED_BLOCK": block, "BLOCK": SUMMED}


def _product(kind: str, sizes: tuple[int, int], experts: tuple[int, int], gate: str) -> Compiled:
    names = ("x", "weight", "output")
    signature = {**dict.fromkeys(names, f"*{kind}"), "order": "*i64", "bounds": "*i64"}
    constants = _constants(*sizes, *experts, gate)
    options = _options(2)
    return Compiled(
        f"{sizes[0]} to {sizes[1]}, {experts[0]} experts, {gate or 'plain'}, {kind}",
        _multiply,
        {**signature, "x_row": "i32"},
        constants,
        warps=options["num_warps"],
        stages=options["num_stages"],
        tensor_cores=True,
        aligned=(*signature, "x_row"),
    )


def _sum(kind: str, hidden: int, picked: int) -> Compiled:
    tensors = {"parts": f"*{kind}", "experts": "*i64", "weights": "*fp32", "output": f"*{kind}"}
    label = f"{hidden} of {picked} experts, {kind}"
    return Compiled(label, _add, tensors, _sums(hidden, picked), stages=3, aligned=(*tensors,))


COMPILED = [
    _product("bf16", (2048, 768), (128, 8), "silu"),
    _product("bf16", (768, 2048), (128, 8), ""),
    _product("fp16", (4096, 14336), (8, 2), "silu"),
    _product("fp16", (14336, 4096), (8, 2), ""),
    _product("bf16", (2048, 1408), (64, 6), "gelu_tanh"),
    _sum("bf16", 2048, 8),
    _sum("fp16", 4096, 2),
]
