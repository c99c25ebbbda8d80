"""Linear layers with 8-bit floating-point weights, for GPUs.

Where tensor cores multiply FP8 (from sm_89 on), activations are quantized too, with a scale per
token and group of inputs; on older GPUs weights are converted to 16 bits, which is exact. Sums are
float32: by tensor cores within a group of inputs, scaled and added outside of them between groups.

Few tokens give few programs, too few to saturate the memory bandwidth; then several programs share
the inputs of an output, and their partial sums are added in order.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.3.2 (fine-grained quantization
and increased accumulation precision).
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.fp8_weights import Fp8Matrix
from gllm.kernels.triton import common
from gllm.kernels.triton.common import INTERPRETED, dot
from gllm.kernels.triton.kernel_specs import KernelSpec, TunedConstants
from gllm.kernels.triton.tiles import choose_tiles

GROUP = 128
"""Inputs per group: those of one product of tiles."""
IN_FLIGHT = 24_576
"""Bytes of weights in flight per processor that saturate the memory bandwidth: 4.8 TB/s times
0.7 us, divided by the 132 processors of an H200."""
LEAST = 4
"""Minimum number of groups per part of the inputs."""
ADDED = 1024
"""Outputs per program of the kernel that adds parts."""
LARGEST = tl.constexpr(448.0)
"""Largest finite value of FP8 E4M3."""
HALF = tl.constexpr(256.0)
"""Ratio of an E4M3 value to the float16 value of its shifted bits."""


@triton.jit
def _from_codes(codes):
    """Convert codes (uint8) to float16, HALF times too small; NaN stays NaN."""
    wide = codes.to(tl.int16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    bits = tl.where((wide & 0x7F) == 0x7F, 0x7E00, bits.to(tl.int32)).to(tl.int16)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def _rounded(x):
    """Round x float32, at most LARGEST in magnitude, to the nearest E4M3 value, as float32."""
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Half of what is dropped is added, a bit less where the last that stays is even.
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0x7FF00000
    # Adding 2^14 leaves multiples of 2^-9, which small ones are.
    small = (magnitude + 16384.0) - 16384.0
    made = tl.where(magnitude < 0.015625, small, normal.to(tl.float32, bitcast=True))
    return tl.where(x < 0, -made, tl.where(x == x, made, x))


@triton.jit
def _to_codes(x):
    """Convert x float32, exactly representable in E4M3, to codes (uint8)."""
    half = (x * (1.0 / 256.0)).to(tl.float16)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    codes = ((bits >> 8) & 0x80) | ((bits >> 7) & 0x7F)
    return tl.where(x == x, codes, 0x7F).to(tl.uint8)


@triton.jit
def _quantize_kernel(
    x, codes, scales, inputs, groups, x_row,
    GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Quantize TILE groups of GROUP inputs of one token.

    Grid: (tokens, blocks of TILE groups). x [tokens, inputs], x_row elements between tokens; codes
    [tokens, inputs] uint8; scales [tokens, groups] float32.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = columns < inputs
    numbers = tl.load(x + token * x_row + columns, there, 0.0).to(tl.float32)
    most = tl.max(tl.abs(numbers), 1)
    scale = tl.where(most > 0, most / LARGEST, 1.0)
    # A quotient may be LARGEST and a bit, which is LARGEST when it is rounded.
    share = _rounded(numbers / scale[:, None])
    tl.store(codes + token * inputs + columns, _to_codes(share), there)
    tl.store(scales + token * groups + group, scale, group < groups)


@triton.jit
def add_group(total, a, codes, share, scale, FP8: tl.constexpr):
    """Add the product of one quantization group of inputs to total [m, n] float32.

    Adds a [m, k] @ codes [k, n] (FP8 as uint8) * scale [n]. If FP8, a contains FP8 codes too, whose
    scales are share [m]. Triton device function.
    """
    zeros = tl.zeros(total.shape, tl.float32)
    if FP8:
        if INTERPRETED:
            left = _from_codes(a).to(tl.float32)
            product = dot(left, _from_codes(codes).to(tl.float32), zeros) * (HALF * HALF)
        else:
            left = a.to(tl.float8e4nv, bitcast=True)
            product = dot(left, codes.to(tl.float8e4nv, bitcast=True), zeros)
        total += product * share[:, None] * scale[None, :]
    else:
        floats = _from_codes(codes).to(tl.float32).to(a.dtype)
        total += dot(a, floats, zeros) * (scale * HALF)[None, :]
    return total


@triton.jit(do_not_specialize=["tokens", "groups", "part", "blocks"])
def _linear_kernel(
    out, x, x_scales, codes, scales, bias, tokens, outputs, inputs, groups, part, blocks, x_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, FP8: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute one tile of outputs over one part of the inputs.

    Grid: (tiles of BLOCK_N outputs, tiles of BLOCK_M tokens, parts). out [parts, tokens, outputs];
    x [tokens, inputs], with FP8 as codes with x_scales [tokens, groups] float32; codes [outputs,
    inputs] uint8; scales [blocks of outputs, blocks] float32 for blocks of ROWS outputs and COLUMNS
    groups of GROUP inputs; bias [outputs]. A part has `part` groups.
    """
    rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < tokens, columns < outputs
    inner = tl.arange(0, GROUP)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    begin = tl.program_id(2) * part
    for group in range(begin, tl.minimum(begin + part, groups)):
        at = group * GROUP + inner
        is_input = at < inputs
        a = tl.load(x + rows[:, None] * x_row + at[None, :], is_row[:, None] & is_input[None, :], 0)
        w = tl.load(
            codes + columns[None, :] * inputs + at[:, None],
            is_column[None, :] & is_input[:, None],
            0,
        )
        scale = tl.load(scales + columns // ROWS * blocks + group // COLUMNS, is_column, 0.0)
        share = tl.zeros((BLOCK_M,), tl.float32)
        if FP8:
            share = tl.load(x_scales + rows * groups + group, is_row, 0.0)
        total = add_group(total, a, w, share, scale, FP8)
    if BIAS:
        total += tl.load(bias + columns, is_column, 0.0).to(tl.float32)[None, :]
    rows += tl.program_id(2).to(tl.int64) * tokens
    place = out + rows[:, None] * outputs + columns[None, :]
    tl.store(place, total.to(out.dtype.element_ty), is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["parts"])
def _add_kernel(
    out, partial, bias, outputs, parts, out_row, BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add the partial sums and the bias.

    Grid: (tokens, blocks of BLOCK outputs). out [tokens, outputs], out_row elements between tokens;
    partial [parts, tokens, outputs] float32; bias [outputs].
    """
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < outputs
    token = tl.program_id(0).to(tl.int64)
    at = token * outputs + columns
    step = tl.num_programs(0).to(tl.int64) * outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(parts):
        total += tl.load(partial + part * step + at, there, 0.0)
    if BIAS:
        total += tl.load(bias + columns, there, 0.0).to(tl.float32)
    tl.store(out + token * out_row + columns, total.to(out.dtype.element_ty), there)


@cache
def multiplies_fp8(device: torch.device) -> bool:
    """Return True if the tensor cores of a GPU support FP8."""
    return torch.cuda.get_device_capability(device) >= (8, 9)


def quantize(x: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Quantize activations x [tokens, inputs] to FP8, with one scale per group of a token's inputs.

    Args:
        x: [tokens, inputs].
        group: inputs per group.

    Returns:
        Codes [tokens, inputs] uint8 and scales [tokens, groups] float32.
    """
    tokens, inputs = x.shape
    groups = triton.cdiv(inputs, group)
    codes = torch.empty(tokens, inputs, dtype=torch.uint8, device=x.device)
    scales = torch.empty(tokens, groups, dtype=torch.float32, device=x.device)
    if tokens:
        use = choose_tiles("quantize")
        _quantize_kernel[(tokens, triton.cdiv(groups, use["groups"]))](
            x,
            codes,
            scales,
            inputs,
            groups,
            x.stride(0),
            GROUP=group,
            TILE=use["groups"],
            num_warps=use["warps"],
        )
    return codes, scales


def linear_fp8(
    x: Tensor,
    matrix: "Fp8Matrix",
    bias: Tensor | None,
    out: Tensor | None = None,
    fp8: bool | None = None,
    num_parts: int | None = None,
) -> Tensor:
    """Apply a linear layer with an FP8 weight on a GPU: return x W^T + b, [tokens, outputs].

    Args:
        x: [tokens, inputs], bfloat16, float16 or float32.
        matrix: W [outputs, inputs].
        bias: b [outputs].
        out: receives the result if given: contiguous, of x's dtype or float32.
        fp8: quantize activations to FP8 too; None: if the GPU multiplies FP8.
        num_parts: largest number of parts of the inputs; None: `choose_num_parts`.

    Raises:
        ValueError: The width of blocks is not 32, 64, a multiple of 128 or the number of inputs.
    """
    (tokens, inputs), outputs = x.shape, matrix.outputs
    group, width = choose_group_sizes(matrix.columns, inputs)
    if out is None:
        out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    scales = matrix.scales
    fp8 = multiplies_fp8(x.device) if fp8 is None else fp8
    if fp8:
        x, scales = quantize(x, group)
    use = choose_tiles("linear_fp8", tokens=tokens)
    grid = triton.cdiv(outputs, use["columns"]), triton.cdiv(tokens, use["rows"])
    groups = triton.cdiv(inputs, group)
    if num_parts is None:
        processors = common.count_processors(x.device)
        num_parts = choose_num_parts(tokens, inputs, groups, grid, use, processors)
    part = triton.cdiv(groups, num_parts)
    parts = triton.cdiv(groups, part)
    biased, to = bias is not None, out
    if parts > 1:
        to = torch.empty(parts, tokens, outputs, dtype=torch.float32, device=x.device)
    bias = out if bias is None else bias
    _linear_kernel[(*grid, parts)](
        to,
        x,
        scales,
        matrix.codes.view(torch.uint8),
        matrix.scales,
        bias,
        tokens,
        outputs,
        inputs,
        groups,
        part,
        matrix.scales.shape[1],
        x.stride(0),
        **_constants(matrix.rows, width, fp8, biased and parts == 1, group, use),
        num_warps=use["warps"],
        num_stages=use["stages"],
    )
    if parts > 1:
        add_parts(to, bias if biased else None, out)
    return out


def add_parts(partial: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write the sums of partial sums, added in order, and of the bias to `out`.

    Args:
        partial: [parts, tokens, outputs] float32.
        bias: [outputs].
        out: [tokens, outputs], rows are contiguous.
    """
    parts, tokens, outputs = partial.shape
    _add_kernel[(tokens, triton.cdiv(outputs, ADDED))](
        out,
        partial,
        out if bias is None else bias,
        outputs,
        parts,
        out.stride(0),
        BIAS=bias is not None,
        BLOCK=ADDED,
    )


def choose_group_sizes(columns: int, inputs: int) -> tuple[int, int]:
    """Return the number of inputs per quantization group, and of groups per block of the weight.

    Args:
        columns: inputs per block of the weight.
        inputs: inputs of the weight.

    Raises:
        ValueError: `columns` is not 32, 64, a multiple of 128 or the number of inputs.
    """
    width = triton.cdiv(inputs, GROUP) * GROUP if columns >= inputs else columns
    group = min(width, GROUP)
    if group not in (32, 64, GROUP) or width % group:
        raise ValueError(f"blocks of {columns} inputs are not implemented on GPUs")
    return group, width // group


def choose_num_parts(
    tokens: int,
    inputs: int,
    groups: int,
    grid: tuple[int, int],
    use: Mapping[str, int],
    processors: int,
) -> int:
    """Return the number of parts that the inputs are split into (split-K), to keep memory busy.

    Each processor should have IN_FLIGHT bytes of weights in flight. The partial sums, which are
    written and read, are at most half of the bytes of the weight.

    Args:
        tokens: rows of x.
        inputs: inputs of the weight.
        groups: quantization groups of the inputs.
        grid: GPU programs of the launch without splits.
        use: tile sizes.
        processors: streaming multiprocessors of the device.
    """
    programs = grid[0] * grid[1]
    reading = max(use["stages"] - 1, 1) * use["columns"] * GROUP
    wanted = -(-IN_FLIGHT * processors // (reading * programs))
    return max(1, min(wanted, inputs // (16 * tokens), groups // LEAST))


def _constants(
    rows: int, blocks: int, fp8: bool, bias: bool, group: int, use: Mapping[str, int]
) -> dict[str, Any]:
    sizes = {"BLOCK_M": use["rows"], "BLOCK_N": use["columns"], "GROUP": group}
    return {"ROWS": rows, "COLUMNS": blocks, "FP8": fp8, "BIAS": bias, **sizes}


def _compiled(
    label: str, tokens: int, floats: str, fp8: bool, bias: bool, out: str = ""
) -> KernelSpec:
    tensors = {
        "out": f"*{out or floats}",
        "x": "*u8" if fp8 else f"*{floats}",
        "x_scales": "*fp32",
        "codes": "*u8",
        "scales": "*fp32",
        "bias": f"*{floats}",
    }
    numbers = ("tokens", "outputs", "inputs", "groups", "part", "blocks", "x_row")
    return KernelSpec(
        label=f"{label}, {floats}, {'8-bit' if fp8 else '16-bit'} products",
        kernel=_linear_kernel,
        signature=tensors | dict.fromkeys(numbers, "i32"),
        constants={},
        tensor_cores=True,
        min_arch=89 if fp8 else 80,
        aligned=(*tensors, "outputs", "inputs", "x_row"),
        tuned=TunedConstants(
            "linear_fp8",
            {"tokens": tokens},
            lambda use: _constants(128, 1, fp8, bias, GROUP, use),
        ),
    )


KERNEL_SPECS = [
    *(
        _compiled(label, tokens, floats, fp8, floats == "bf16")
        for label, tokens in (("decode", 16), ("small batch", 32), ("prefill", 64))
        for floats in ("bf16", "fp16")
        for fp8 in (False, True)
    ),
    *(
        KernelSpec(
            label=f"activations to 8 bits, {floats}",
            kernel=_quantize_kernel,
            signature={
                "x": f"*{floats}",
                "codes": "*u8",
                "scales": "*fp32",
                **dict.fromkeys(("inputs", "groups", "x_row"), "i32"),
            },
            constants={"GROUP": GROUP},
            aligned=("x", "codes", "scales", "inputs", "x_row"),
            stages=3,
            tuned=TunedConstants("quantize", {}, lambda use: {"TILE": use["groups"]}),
        )
        for floats in ("bf16", "fp16")
    ),
    *(
        _compiled(f"{tokens} tokens in parts", tokens, "bf16", fp8, False, "fp32")
        for tokens in (16, 32)
        for fp8 in (False, True)
    ),
    *(
        KernelSpec(
            label=f"sum of parts, {floats}",
            kernel=_add_kernel,
            signature={
                "out": f"*{floats}",
                "partial": "*fp32",
                "bias": f"*{floats}",
                "outputs": "i32",
                "parts": "i32",
                "out_row": "i32",
            },
            constants={"BIAS": True, "BLOCK": ADDED},
            aligned=("out", "partial", "bias", "outputs", "out_row"),
            stages=3,
        )
        for floats in ("bf16", "fp16")
    ),
]
