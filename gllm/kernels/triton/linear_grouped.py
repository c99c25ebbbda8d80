"""Linear layers with weights of few bits in groups (W4A16, W8A16), for GPUs.

Weights stay packed in memory. A tile of them is converted in registers to the dtype of the
activations and multiplied on tensor cores; sums are float32.

The inputs are divided into parts, by the sizes of the weight alone. The sum of each part is
computed from zero, and those of the parts are added in order: by one program where there are
enough of them, else by a program per part (split-K) and a second kernel. Both give the same bits.

Source: Frantar et al., "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large
Language Models" (2024), section 3 (why few tokens are bound by memory, and splits of the inputs).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.grouped_words import GroupedWords, WordTensors
from gllm.kernels.triton import common
from gllm.kernels.triton.common import dot
from gllm.kernels.triton.kernel_specs import KernelSpec, TunedConstants
from gllm.kernels.triton.linear_fp8 import IN_FLIGHT, LEAST, add_parts
from gllm.kernels.triton.tiles import choose_tiles

FEW = 16
"""Tokens up to which partial sums are at most half of the bytes of the weight."""


@triton.jit
def load_weights(
    codes, high, scales, scale_units, minimums, minimum_units, table, span, columns, there,
    outputs,
    WIDTH: tl.constexpr, SPAN: tl.constexpr, SHARED: tl.constexpr, GROUP: tl.constexpr,
    UNIT: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr, MINIMUMS: tl.constexpr,
):  # fmt: skip
    """Load the weights [SPAN, n] float32 of a span of inputs and n outputs, at columns [n].

    The tensors are those of GroupedWords; there [n]: which outputs exist. SHARED: inputs of a span
    that share a scale, a divisor of SPAN and GROUP; UNIT: groups per unit, 0 without. Triton device
    function.
    """
    BITS: tl.constexpr = 8 if WIDTH == 8 else 4
    CODES: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = SPAN // CODES
    GROUPS: tl.constexpr = SPAN // SHARED
    n: tl.constexpr = columns.shape[0]
    known = there[None, :]
    word = (span * WORDS + tl.arange(0, WORDS)).to(tl.int64)
    at = word[:, None] * outputs + columns[None, :]
    index = tl.arange(0, CODES)[:, None, None]
    number = (tl.load(codes + at, known, 0)[None, :, :] >> (index * BITS)) & ((1 << BITS) - 1)
    if WIDTH == 6:
        upper = tl.load(high + at, known, 0).to(tl.int32)[None, :, :]
        number |= ((upper >> (index * 2)) & 3) << 4
    if TABLE:
        # Four codes per word of the table.
        first = tl.where((number & 4) != 0, tl.load(table + 1), tl.load(table))
        second = tl.where((number & 4) != 0, tl.load(table + 3), tl.load(table + 2))
        number = (tl.where((number & 8) != 0, second, first) >> ((number & 3) * 8)) & 255
    # The bits of 2^23 + number: subtracting converts it, exactly.
    weights = (number | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)
    weights = tl.reshape(weights, (GROUPS, SHARED, n))
    group = (span * GROUPS + tl.arange(0, GROUPS)) * SHARED // GROUP
    place = group.to(tl.int64)[:, None] * outputs + columns[None, :]
    scale = tl.load(scales + place, known, 0).to(tl.float32)
    if UNIT:
        unit = (group // UNIT).to(tl.int64)[:, None] * outputs + columns[None, :]
        scale *= tl.load(scale_units + unit, known, 0).to(tl.float32)
    weights = weights * scale[:, None, :]
    if MINIMUMS:
        minimum = tl.load(minimums + place, known, 0).to(tl.float32)
        if UNIT:
            minimum *= tl.load(minimum_units + unit, known, 0).to(tl.float32)
        weights -= minimum[:, None, :]
    return tl.reshape(weights, (SPAN, n))


@triton.jit(do_not_specialize=["tokens", "spans", "part", "parts"])
def _linear_kernel(
    out, x, codes, high, scales, scale_units, minimums, minimum_units, table, bias, tokens, outputs,
    inputs, spans, part, parts, x_row, out_row,
    WIDTH: tl.constexpr, SPAN: tl.constexpr, SHARED: tl.constexpr, GROUP: tl.constexpr,
    UNIT: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr, MINIMUMS: tl.constexpr,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute one tile of outputs over `parts` parts of the inputs, each of `part` spans.

    Grid: (tiles of BLOCK_N outputs, tiles of BLOCK_M tokens, sets of parts). out [sets of parts,
    tokens, outputs], out_row elements between tokens; x [tokens, inputs], x_row elements between
    tokens; codes to table: see load_weights; bias [outputs].
    """
    rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < tokens, columns < outputs
    inner = tl.arange(0, SPAN)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    first = tl.program_id(2) * parts
    for index in range(first, first + parts):
        own = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for span in range(index * part, tl.minimum(index * part + part, spans)):
            at = span * SPAN + inner
            within = is_row[:, None] & (at < inputs)[None, :]
            a = tl.load(x + rows[:, None] * x_row + at[None, :], within, 0)
            weights = load_weights(
                codes, high, scales, scale_units, minimums, minimum_units, table, span, columns,
                is_column, outputs, WIDTH, SPAN, SHARED, GROUP, UNIT, ZERO, TABLE, MINIMUMS,
            )  # fmt: skip
            own = dot(a, weights.to(a.dtype), own)
        total += own
    if BIAS:
        total += tl.load(bias + columns, is_column, 0.0).to(tl.float32)[None, :]
    rows += tl.program_id(2).to(tl.int64) * tokens
    place = out + rows[:, None] * out_row + columns[None, :]
    tl.store(place, total.to(out.dtype.element_ty), is_row[:, None] & is_column[None, :])


def linear_grouped(
    x: Tensor,
    words: GroupedWords,
    bias: Tensor | None,
    out: Tensor | None = None,
    num_parts: int | None = None,
    split: bool | None = None,
) -> Tensor:
    """Apply a linear layer with a weight of few bits on a GPU: return x W^T + b, [tokens, outputs].

    Args:
        x: [tokens, inputs], bfloat16, float16 or float32.
        words: W [outputs, inputs].
        bias: b [outputs].
        out: receives the result if given: of x's dtype or float32, rows are contiguous.
        num_parts: largest number of parts of the inputs; None: `choose_num_parts`.
        split: True computes each part in programs of its own; None: if there are few programs.
    """
    tokens, outputs = len(x), words.outputs
    if out is None:
        out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    x = x if words.order is None else x.index_select(1, words.order)
    x = x if x.stride(1) == 1 else x.contiguous()
    use, spans = choose_tiles("linear_grouped", tokens=tokens), len(words.codes)
    grid = triton.cdiv(outputs, use["columns"]), triton.cdiv(tokens, use["rows"])
    processors = common.count_processors(x.device)
    if num_parts is None:
        num_parts = choose_num_parts(outputs, spans, words.span, words.width, processors)
    part = triton.cdiv(spans, num_parts)
    parts = triton.cdiv(spans, part)
    if split is None:
        split = 2 * grid[0] * grid[1] <= processors
    sets, biased, to = (parts if split else 1), bias is not None, out
    if sets > 1:
        to = torch.empty(parts, tokens, outputs, dtype=torch.float32, device=x.device)
    _linear_kernel[(*grid, sets)](
        to,
        x,
        *list_tensors(words),
        out if bias is None else bias,
        tokens,
        outputs,
        words.inputs,
        spans,
        part,
        parts // sets,
        x.stride(0),
        to.stride(-2),
        **kind_constants(words),
        **_constants(biased and sets == 1, use),
        num_warps=use["warps"],
        num_stages=use["stages"],
    )
    if sets > 1:
        add_parts(to, bias, out)
    return out


def choose_num_parts(outputs: int, spans: int, span: int, width: int, processors: int) -> int:
    """Return the number of parts of the inputs, each of which a program may compute (split-K).

    For few tokens, each processor should have IN_FLIGHT bytes of weights in flight. The number is
    that of the weight and the GPU, whatever the number of tokens, as results depend on it.

    Args:
        outputs: outputs of the weight.
        spans: spans of its inputs.
        span: inputs per span.
        width: bits of a code.
        processors: streaming multiprocessors of the device.
    """
    use = choose_tiles("linear_grouped", tokens=1)
    reading = max(use["stages"] - 1, 1) * use["columns"] * span * width // 8
    wanted = -(-IN_FLIGHT * processors // (reading * -(-outputs // use["columns"])))
    return max(1, min(wanted, spans * span * width // (128 * FEW), spans // LEAST))


def list_tensors(words: WordTensors) -> list[Tensor]:
    """Return the tensors that `load_weights` reads; the codes in place of those that lack."""
    table = None if words.table is None else words.table.view(torch.int32)
    codes, optional = words.codes, (words.scale_units, words.minimums, words.minimum_units, table)
    return [
        *(codes, codes if words.high is None else words.high, words.scales),
        *(codes if tensor is None else tensor for tensor in optional),
    ]


def kind_constants(words: WordTensors) -> dict[str, Any]:
    """Return the constants of `load_weights`."""
    kind = words.width, words.span, words.group, words.groups_per_unit, words.zero
    return _kind(*kind, words.table is not None, words.minimums is not None)


def _kind(
    width: int, span: int, group: int, unit: int, zero: int, has_table: bool, has_minimums: bool
) -> dict[str, Any]:
    return {
        "WIDTH": width,
        "SPAN": span,
        "SHARED": math.gcd(span, group),
        "GROUP": group,
        "UNIT": unit,
        "ZERO": zero,
        "TABLE": has_table,
        "MINIMUMS": has_minimums,
    }


def _constants(bias: bool, use: Mapping[str, int]) -> dict[str, Any]:
    return {"BIAS": bias, "BLOCK_M": use["rows"], "BLOCK_N": use["columns"]}


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("fp16", _kind(4, 128, 32, 0, 8, False, False)),
    "Q4_K": ("i8", _kind(4, 128, 32, 8, 0, False, True)),
    "GPTQ": ("fp16", _kind(4, 128, 128, 0, 0, False, True)),
    "NVFP4": ("fp32", _kind(4, 128, 16, 0, 12, True, False)),
    "Q6_K": ("i8", _kind(6, 128, 16, 16, 32, False, False)),
    "Q8_0": ("fp16", _kind(8, 128, 32, 0, 128, False, False)),
}
"""Type of the scales and constants of `load_weights`, by names of kinds of weights."""


def weight_signature(scales: str) -> dict[str, str]:
    """Return the types of the tensors of `list_tensors`; scales: that of scales and minimums."""
    return {
        "codes": "*i32",
        "high": "*i16",
        "scales": f"*{scales}",
        "scale_units": "*fp16",
        "minimums": f"*{scales}",
        "minimum_units": "*fp16",
        "table": "*i32",
    }


def _compiled(kind: str, tokens: int, floats: str, out: str = "") -> KernelSpec:
    scales, constants = KINDS[kind]
    tensors = {"out": f"*{out or floats}", "x": f"*{floats}", **weight_signature(scales)}
    tensors["bias"] = f"*{floats}"
    numbers = ("tokens", "outputs", "inputs", "spans", "part", "parts", "x_row", "out_row")
    return KernelSpec(
        label=f"{kind}, {tokens} tokens, {floats}{', in parts' if out else ''}",
        kernel=_linear_kernel,
        signature=tensors | dict.fromkeys(numbers, "i32"),
        constants=constants,
        tensor_cores=True,
        aligned=(*tensors, "outputs", "inputs", "x_row", "out_row"),
        tuned=TunedConstants(
            "linear_grouped", {"tokens": tokens}, lambda use: _constants(not out, use)
        ),
    )


KERNEL_SPECS = [
    *(_compiled(kind, tokens, "bf16") for kind in KINDS for tokens in (16, 32, 64)),
    *(_compiled("int4", tokens, "fp16") for tokens in (16, 32, 64)),
    *(_compiled(kind, 16, "bf16", "fp32") for kind in ("int4", "Q6_K")),
]
