"""Products of a mixture of experts with 8-bit floating-point weights, for GPUs.

The product of one group of inputs is in linear_fp8.py, blocks of rows are in expert_blocks.py.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.fp8_weights import Fp8Stack
from gllm.kernels.triton.expert_blocks import (
    SortedPairs,
    add_biases,
    block_rows,
    expert_constants,
    expert_lookup_sizes,
    find_block,
    store_tile,
)
from gllm.kernels.triton.kernel_specs import KernelSpec, TunedConstants
from gllm.kernels.triton.linear_fp8 import (
    GROUP,
    add_group,
    choose_group_sizes,
    multiplies_fp8,
    quantize,
)
from gllm.kernels.triton.tiles import choose_tiles


@triton.jit
def _multiply(
    x, x_scales, codes, scales, bias, output, order, bounds, x_row,
    TOP_K: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, FP8: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply one tile of a block's rows by the FP8 weight of their expert, as experts._multiply.

    Grid: (tiles of COLUMNS outputs, blocks of ROWS rows). codes uint8, shaped as weight there;
    scales [EXPERTS, blocks of outputs, blocks of inputs] float32 for blocks of SCALE_ROWS outputs
    and SCALE_COLUMNS groups of GROUP inputs. With FP8, x is codes uint8 with x_scales [rows,
    groups] float32.
    """
    block = tl.program_id(1)
    expert, row, there, pair = find_block(block, order, bounds, EXPERTS, EXPERTS_BLOCK, ROWS)
    if expert < EXPERTS:
        GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
        BLOCKS: tl.constexpr = (GROUPS + SCALE_COLUMNS - 1) // SCALE_COLUMNS
        source, to = block_rows(row, pair, TOP_K, GATE)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        known = column < OUTPUTS
        maps: tl.constexpr = 2 if GATE != "" else 1
        codes += expert.to(tl.int64) * (maps * OUTPUTS * INPUTS)
        scales += expert.to(tl.int64) * ((maps * OUTPUTS + SCALE_ROWS - 1) // SCALE_ROWS * BLOCKS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        other = tl.zeros((ROWS, COLUMNS), tl.float32)
        for group in range(GROUPS):
            inner = group * GROUP + tl.arange(0, GROUP)
            within = inner < INPUTS
            left_at = x + source.to(tl.int64)[:, None] * x_row + inner[None, :]
            left = tl.load(left_at, there[:, None] & within[None, :], 0)
            share = tl.zeros((ROWS,), tl.float32)
            if FP8:
                share = tl.load(x_scales + source * GROUPS + group, there, 0.0)
            right_at = codes + column[None, :] * INPUTS + inner[:, None]
            right_there = within[:, None] & known[None, :]
            scale_at = scales + group // SCALE_COLUMNS
            right = tl.load(right_at, right_there, 0)
            scale = tl.load(scale_at + column // SCALE_ROWS * BLOCKS, known, 0.0)
            total = add_group(total, left, right, share, scale, FP8)
            if GATE != "":
                right = tl.load(right_at + OUTPUTS * INPUTS, right_there, 0)
                behind = (OUTPUTS + column) // SCALE_ROWS * BLOCKS
                scale = tl.load(scale_at + behind, known, 0.0)
                other = add_group(other, left, right, share, scale, FP8)
        total, other = add_biases(total, other, bias, expert, column, OUTPUTS, GATE, BIAS)
        store_tile(total, other, output, to, column, there, OUTPUTS, GATE)


def multiply_experts(
    source: Tensor,
    weight: Fp8Stack,
    bias: Tensor | None,
    to: Tensor,
    pairs: SortedPairs,
    gate: str,
    fp8: bool | None,
) -> None:
    """Multiply the rows of a batch by the FP8 weights of their experts, writing to `to`.

    bias: [experts, outputs of the weight], added to the products.

    With a gate (the name of an activation) `source` [tokens, inputs] is in token order and `to`
    [pairs, outputs] is sorted by expert. Without one (down projection) `source` is sorted by expert
    and `to` is in the order of (token, expert) pairs.

    Raises:
        ValueError: linear_fp8 has no kernel for the block size of the weight.
    """
    inputs = source.shape[1]
    group, width = choose_group_sizes(weight.columns, inputs)
    fp8 = multiplies_fp8(source.device) if fp8 is None else fp8
    scales = weight.scales
    if fp8:
        source, scales = quantize(source, group)
    use = choose_tiles("experts_fp8", **expert_lookup_sizes(gate, source.element_size()))
    grid = triton.cdiv(to.shape[1], use["columns"]), pairs.blocks(use["rows"])
    _multiply[grid](
        source,
        scales,
        weight.codes.view(torch.uint8),
        weight.scales,
        bias,
        to,
        pairs.order,
        pairs.bounds,
        source.stride(0),
        BIAS=bias is not None,
        **pairs.constants(),
        **_constants((inputs, to.shape[1]), gate, (weight.rows, width), fp8, group, use),
        num_warps=use["warps"],
        num_stages=use["stages"],
    )


def _constants(
    sizes: tuple[int, int],
    gate: str,
    block: tuple[int, int],
    fp8: bool,
    group: int,
    use: Mapping[str, int],
) -> dict[str, Any]:
    """Return the constants; sizes: inputs and outputs; block: outputs and groups per scale."""
    names = ("INPUTS", "OUTPUTS", "SCALE_ROWS", "SCALE_COLUMNS")
    tile = {"ROWS": use["rows"], "COLUMNS": use["columns"], "GROUP": group}
    return {**dict(zip(names, sizes + block, strict=True)), "GATE": gate, "FP8": fp8, **tile}


def _compiled(
    kind: str, sizes: tuple[int, int], experts: tuple[int, int], gate: str, fp8: bool
) -> KernelSpec:
    pointers = {
        "x": "*u8" if fp8 else f"*{kind}",
        "x_scales": "*fp32",
        "codes": "*u8",
        "scales": "*fp32",
        "output": f"*{kind}",
        "order": "*i64",
        "bounds": "*i64",
    }
    element = 1 if fp8 else 4 if kind == "fp32" else 2
    products = f"{8 * element}-bit products"
    return KernelSpec(
        f"{sizes[0]} to {sizes[1]}, {experts[0]} experts, {gate or 'plain'}, {kind}, {products}",
        _multiply,
        {**pointers, "x_row": "i32"},
        {**expert_constants(*experts), "bias": None, "BIAS": False},
        tensor_cores=True,
        min_arch=89 if fp8 else 80,
        aligned=(*pointers, "x_row"),
        tuned=TunedConstants(
            "experts_fp8",
            expert_lookup_sizes(gate, element),
            lambda use: _constants(sizes, gate, (GROUP, 1), fp8, GROUP, use),
        ),
    )


KERNEL_SPECS = [
    *(
        _compiled(kind, sizes, (128, 8), gate, fp8)
        for kind in ("bf16", "fp16")
        for sizes, gate in (((2048, 768), "silu"), ((768, 2048), ""))
        for fp8 in (False, True)
    ),
    _compiled("bf16", (7168, 2048), (256, 8), "silu", True),
    _compiled("bf16", (2048, 7168), (256, 8), "", True),
    _compiled("fp32", (2048, 768), (128, 8), "silu", False),
    _compiled("fp32", (768, 2048), (128, 8), "", False),
]
