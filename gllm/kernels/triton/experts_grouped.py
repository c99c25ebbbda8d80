"""Products of a mixture of experts with weights of few bits, for GPUs.

The weights of a tile are unpacked in linear_grouped.py, blocks of rows are in expert_blocks.py.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.grouped_words import GroupedStack
from gllm.kernels.triton.common import dot
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
from gllm.kernels.triton.linear_grouped import (
    KINDS,
    kind_constants,
    list_tensors,
    load_weights,
    weight_signature,
)
from gllm.kernels.triton.tiles import choose_tiles


@triton.jit
def _multiply(
    x, codes, high, scales, scale_units, minimums, minimum_units, table, bias, output, order,
    bounds, x_row,
    TOP_K: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    SPAN: tl.constexpr, SHARED: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr,
    ZERO: tl.constexpr, TABLE: tl.constexpr, MINIMUMS: tl.constexpr, GROUPS: tl.constexpr,
    UNITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply one tile of a block's rows by the weight of their expert, as experts._multiply.

    Grid: (tiles of COLUMNS outputs, blocks of ROWS rows). codes to table: those of GroupedStack,
    with GROUPS scales and UNITS units per expert and output; WIDTH to MINIMUMS: see load_weights.
    """
    block = tl.program_id(1)
    expert, row, there, pair = find_block(block, order, bounds, EXPERTS, EXPERTS_BLOCK, ROWS)
    if expert < EXPERTS:
        source, to = block_rows(row, pair, TOP_K, GATE)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        known = column < OUTPUTS
        SPANS: tl.constexpr = (INPUTS + SPAN - 1) // SPAN
        WORDS: tl.constexpr = SPANS * SPAN * (8 if WIDTH == 8 else 4) // 32
        ALL: tl.constexpr = (2 if GATE != "" else 1) * OUTPUTS
        own = expert.to(tl.int64) * ALL
        codes += own * WORDS
        high += own * WORDS
        scales += own * GROUPS
        scale_units += own * UNITS
        minimums += own * GROUPS
        minimum_units += own * UNITS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        other = tl.zeros((ROWS, COLUMNS), tl.float32)
        for span in range(SPANS):
            inner = span * SPAN + tl.arange(0, SPAN)
            left_at = x + source.to(tl.int64)[:, None] * x_row + inner[None, :]
            left = tl.load(left_at, there[:, None] & (inner < INPUTS)[None, :], 0.0)
            weights = load_weights(
                codes, high, scales, scale_units, minimums, minimum_units, table, span, column,
                known, ALL, WIDTH, SPAN, SHARED, GROUP, UNIT, ZERO, TABLE, MINIMUMS,
            )  # fmt: skip
            total = dot(left, weights.to(left.dtype), total)
            if GATE != "":
                weights = load_weights(
                    codes, high, scales, scale_units, minimums, minimum_units, table, span,
                    column + OUTPUTS, known, ALL, WIDTH, SPAN, SHARED, GROUP, UNIT, ZERO, TABLE,
                    MINIMUMS,
                )  # fmt: skip
                other = dot(left, weights.to(left.dtype), other)
        total, other = add_biases(total, other, bias, expert, column, OUTPUTS, GATE, BIAS)
        store_tile(total, other, output, to, column, there, OUTPUTS, GATE)


def multiply_experts(
    source: Tensor,
    weight: GroupedStack,
    bias: Tensor | None,
    to: Tensor,
    pairs: SortedPairs,
    gate: str,
) -> None:
    """Multiply the rows of a batch by the weights of their experts, writing to `to`.

    bias: [experts, outputs of the weight], added to the products.

    With a gate (the name of an activation) `source` [tokens, inputs] is in token order and `to`
    [pairs, outputs] is sorted by expert. Without one (down projection) `source` is sorted by expert
    and `to` is in the order of (token, expert) pairs.
    """
    use = choose_tiles("experts_grouped", **expert_lookup_sizes(gate, source.element_size()))
    grid = triton.cdiv(to.shape[1], use["columns"]), pairs.blocks(use["rows"])
    groups, units = weight.scales.shape[1], weight.scale_units
    _multiply[grid](
        source,
        *list_tensors(weight),
        bias,
        to,
        pairs.order,
        pairs.bounds,
        source.stride(0),
        BIAS=bias is not None,
        **pairs.constants(),
        **kind_constants(weight),
        **_constants((source.shape[1], to.shape[1]), gate, use),
        GROUPS=groups,
        UNITS=0 if units is None else units.shape[1],
        num_warps=use["warps"],
        num_stages=use["stages"],
    )


def _constants(sizes: tuple[int, int], gate: str, use: Mapping[str, int]) -> dict[str, Any]:
    """Return constants; sizes: inputs and outputs."""
    tile = {"ROWS": use["rows"], "COLUMNS": use["columns"]}
    return {"INPUTS": sizes[0], "OUTPUTS": sizes[1], "GATE": gate, **tile}


def _compiled(kind: str, floats: str, sizes: tuple[int, int], gate: str) -> KernelSpec:
    scales, constants = KINDS[kind]
    pointers = {
        "x": f"*{floats}",
        **weight_signature(scales),
        "output": f"*{floats}",
        "order": "*i64",
        "bounds": "*i64",
    }
    groups = sizes[0] // constants["GROUP"]
    units = groups // constants["UNIT"] if constants["UNIT"] else 0
    return KernelSpec(
        f"{kind}, {sizes[0]} to {sizes[1]}, {gate or 'plain'}, {floats}",
        _multiply,
        {**pointers, "x_row": "i32"},
        {
            **expert_constants(128, 8),
            **constants,
            "GROUPS": groups,
            "UNITS": units,
            "BIAS": False,
            "bias": None,
        },
        tensor_cores=True,
        aligned=(*pointers, "x_row"),
        tuned=TunedConstants(
            "experts_grouped",
            expert_lookup_sizes(gate, 4 if floats == "fp32" else 2),
            lambda use: _constants(sizes, gate, use),
        ),
    )


KERNEL_SPECS = [
    _compiled(kind, floats, sizes, gate)
    for kind, floats in (
        *((kind, "bf16") for kind in ("int4", "Q4_K", "NVFP4", "Q6_K", "Q8_0")),
        ("int4", "fp16"),
        ("int4", "fp32"),
    )
    for sizes, gate in (((2048, 768), "silu"), ((768, 2048), ""))
]
