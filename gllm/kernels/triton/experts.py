"""Mixture of experts for GPUs, without synchronization with the host.

This module has the product with 16-bit weights and the weighted sum per token; blocks of rows are
in expert_blocks.py, 8-bit floating-point weights in experts_fp8.py, weights of few bits in
experts_grouped.py. The block size is constant and
the parts of a token are added in the order of the experts' numbers, so the result of a token does
not depend on its batch. Formula: gllm/kernels/experts.py.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.fp8_weights import Fp8Stack
from gllm.kernels.grouped_words import GroupedStack
from gllm.kernels.triton import experts_fp8, experts_grouped
from gllm.kernels.triton.activation import KINDS
from gllm.kernels.triton.common import dot
from gllm.kernels.triton.expert_blocks import (
    SortedPairs,
    add_biases,
    block_rows,
    expert_constants,
    expert_lookup_sizes,
    find_block,
    sort_by_expert,
    store_tile,
)
from gllm.kernels.triton.kernel_specs import KernelSpec, TunedConstants
from gllm.kernels.triton.tiles import choose_tiles

MIN_INNER = 16
"""Fewest inputs of a tile that tensor cores multiply."""


@triton.jit
def _multiply(
    x, weight, bias, output, order, bounds, x_row,
    TOP_K: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Multiply one tile of a block's rows by the weight of their expert.

    Grid: (tiles of COLUMNS outputs, blocks of ROWS rows). order and bounds: see
    expert_blocks.SortedPairs; x has x_row elements per row. With GATE: weight [EXPERTS, 2 *
    OUTPUTS, INPUTS], x [tokens, INPUTS], each token with TOP_K experts, and output [rows, OUTPUTS]
    is in sorted order. Without: weight [EXPERTS, OUTPUTS, INPUTS], x [rows, INPUTS] is in sorted
    order, and output [rows, OUTPUTS] in the order of pairs. INNER: inputs per iteration.
    """
    block = tl.program_id(1)
    expert, row, there, pair = find_block(block, order, bounds, EXPERTS, EXPERTS_BLOCK, ROWS)
    if expert < EXPERTS:
        source, to = block_rows(row, pair, TOP_K, GATE)
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
        total, other = add_biases(total, other, bias, expert, column, OUTPUTS, GATE, BIAS)
        store_tile(total, other, output, to, column, there, OUTPUTS, GATE)


@triton.jit
def _add(
    parts, experts, weights, output,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, TOP_K_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the weighted parts of one token in ascending order of the experts' numbers.

    Grid: (tokens, blocks of BLOCK elements). parts [tokens, TOP_K, HIDDEN]; experts int64 and
    weights float32 [tokens, TOP_K]; output [tokens, HIDDEN].
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, TOP_K_BLOCK)
    own = tl.load(experts + token * TOP_K + place, place < TOP_K, 1 << 30)
    share = tl.load(weights + token * TOP_K + place, place < TOP_K, 0.0).to(tl.float32)
    before = (own[None, :] < own[:, None]) | (
        (own[None, :] == own[:, None]) & (place[None, :] < place[:, None])
    )
    rank = tl.sum(before.to(tl.int32), 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for turn in range(TOP_K):
        which = tl.sum(tl.where(rank == turn, place, 0), 0)
        factor = tl.sum(tl.where(rank == turn, share, 0.0), 0)
        at = parts + (token * TOP_K + which) * HIDDEN + column
        total += tl.load(at, column < HIDDEN, 0.0).to(tl.float32) * factor
    tl.store(output + token * HIDDEN + column, total.to(output.dtype.element_ty), column < HIDDEN)


def run_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    up: Tensor | Fp8Stack | GroupedStack,
    down: Tensor | Fp8Stack | GroupedStack,
    activation: str,
    fp8: bool | None = None,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Run each token's selected experts with Triton kernels; return their weighted sum.

    Args:
        x: [tokens, hidden].
        experts: [tokens, active] int64: ids of the selected experts.
        weights: [tokens, active] float32: weights of these experts.
        up: [experts, 2 * inner, hidden]: gate projections, then up projections.
        down: [experts, hidden, inner].
        activation: name of the gate's activation, for example "silu".
        fp8: True quantizes activations to FP8 for FP8 weights; None: only if the GPU multiplies
            FP8.
        biases: [experts, 2 * inner] of `up` and [experts, hidden] of `down`; None for no biases.

    Returns:
        [tokens, hidden] of the dtype of x.
    """
    if activation not in KINDS:
        raise ValueError(f"no kernel for the activation {activation!r}")
    tokens, hidden = x.shape
    count, _, inner = down.shape
    if not tokens:
        return x.new_empty(tokens, hidden)
    x = x if x.stride(1) == 1 else x.contiguous()
    experts, weights = experts.contiguous(), weights.contiguous()
    pairs = sort_by_expert(experts, count)
    size = len(pairs.order)
    gated, parts = x.new_empty(size, inner), x.new_empty(size, hidden)
    products = (x, up, biases[0], gated, activation), (gated, down, biases[1], parts, "")
    for source, weight, bias, to, gate in products:
        if isinstance(weight, Fp8Stack):
            experts_fp8.multiply_experts(source, weight, bias, to, pairs, gate, fp8)
        elif isinstance(weight, GroupedStack):
            experts_grouped.multiply_experts(source, weight, bias, to, pairs, gate)
        else:
            _launch(source, weight, bias, to, pairs, gate)
    return sum_expert_outputs(parts, experts, weights)


def sum_expert_outputs(parts: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the selected experts' outputs per token, [tokens, hidden].

    Outputs are added in ascending order of expert ids, so that the result does not depend on the
    batch.

    Args:
        parts: [tokens * active, hidden]: output of each (token, expert) pair.
        experts: [tokens, active]: expert ids.
        weights: [tokens, active]: weights of these experts.
    """
    tokens, top_k = experts.shape
    hidden, use = parts.shape[1], choose_tiles("experts_sum")
    output = parts.new_empty(tokens, hidden)
    _add[(tokens, triton.cdiv(hidden, use["elements"]))](
        parts,
        experts,
        weights,
        output,
        **_sums(hidden, top_k, use),
        num_warps=use["warps"],
    )
    return output


def _launch(
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    to: Tensor,
    pairs: SortedPairs,
    gate: str,
) -> None:
    """Fill `to` [rows, outputs] from source [tokens or rows, inputs], as _multiply says."""
    use = choose_tiles("experts", **expert_lookup_sizes(gate, source.element_size()))
    grid = triton.cdiv(to.shape[1], use["columns"]), pairs.blocks(use["rows"])
    _multiply[grid](
        source,
        weight,
        bias,
        to,
        pairs.order,
        pairs.bounds,
        source.stride(0),
        BIAS=bias is not None,
        **pairs.constants(),
        **_constants(source.shape[1], to.shape[1], gate, use),
        num_warps=use["warps"],
        num_stages=use["stages"],
    )


def _constants(inputs: int, outputs: int, gate: str, use: Mapping[str, int]) -> dict[str, Any]:
    return {
        "GATE": gate,
        "INPUTS": inputs,
        "OUTPUTS": outputs,
        "ROWS": use["rows"],
        "COLUMNS": use["columns"],
        "INNER": _inner_tile(inputs, use["inner"]),
    }


def _inner_tile(inputs: int, most: int) -> int:
    """Return the inputs of a tile: half of `most` if that divides them and `most` does not.

    Columns cut over ranks may have such sizes. The mask of a last, smaller tile costs registers:
    352 inputs in tiles of 64 spill on sm_86.
    """
    half = most // 2
    return half if inputs % most and inputs % half == 0 and half >= MIN_INNER else most


def _sums(hidden: int, top_k: int, use: Mapping[str, int]) -> dict[str, int]:
    block = triton.next_power_of_2(top_k)
    return {"HIDDEN": hidden, "TOP_K": top_k, "TOP_K_BLOCK": block, "BLOCK": use["elements"]}


def _product(
    kind: str, sizes: tuple[int, int], experts: tuple[int, int], gate: str, bias: bool = False
) -> KernelSpec:
    names = ("x", "weight", "output", *(("bias",) if bias else ()))
    signature = {**dict.fromkeys(names, f"*{kind}"), "order": "*i64", "bounds": "*i64"}
    return KernelSpec(
        f"{sizes[0]} to {sizes[1]}, {experts[0]} experts, {gate or 'plain'}, {kind}",
        _multiply,
        {**signature, "x_row": "i32"},
        {**expert_constants(*experts), "BIAS": bias, **({} if bias else {"bias": None})},
        tensor_cores=True,
        aligned=(*signature, "x_row"),
        tuned=TunedConstants(
            "experts",
            expert_lookup_sizes(gate, 4 if kind == "fp32" else 2),
            lambda use: _constants(*sizes, gate, use),
        ),
    )


def _sum(kind: str, hidden: int, top_k: int) -> KernelSpec:
    tensors = {"parts": f"*{kind}", "experts": "*i64", "weights": "*fp32", "output": f"*{kind}"}
    return KernelSpec(
        f"{hidden} of {top_k} experts, {kind}",
        _add,
        tensors,
        {},
        stages=3,
        aligned=(*tensors,),
        tuned=TunedConstants("experts_sum", {}, lambda use: _sums(hidden, top_k, use)),
    )


KERNEL_SPECS = [
    _product("bf16", (2048, 768), (128, 8), "silu"),
    _product("bf16", (768, 2048), (128, 8), ""),
    _product("fp16", (4096, 14336), (8, 2), "silu"),
    _product("fp16", (14336, 4096), (8, 2), ""),
    _product("bf16", (2048, 1408), (64, 6), "gelu_tanh"),
    # One of four ranks: DeepSeek-V2-Lite and Qwen3-30B-A3B.
    _product("bf16", (2048, 352), (64, 6), "silu"),
    _product("bf16", (352, 2048), (64, 6), ""),
    _product("bf16", (192, 2048), (128, 8), ""),
    # gpt-oss-20b.
    _product("bf16", (2880, 2880), (32, 4), "swiglu_oai", bias=True),
    _product("fp32", (2048, 768), (128, 8), "silu"),
    _product("fp32", (768, 2048), (128, 8), ""),
    _sum("bf16", 2048, 8),
    _sum("fp16", 4096, 2),
]
