"""Linear maps by weights in 8-bit floating point, for GPUs.

Owns the product of tiles with the scales of their blocks. Where tensor cores multiply 8-bit floats
(from sm_89 on), activations become such numbers too, with a scale for each token and group of
inputs; before, weights become 16-bit floats on the way, which they do exactly. Sums are float32:
the tensor cores' within a group of inputs, scaled and added outside of them from group to group.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.3.2 (fine-grained quantization
and increased accumulation precision).
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.linear_fp8 import Fp8Matrix
from gllm.kernels.triton.ahead import Compiled
from gllm.kernels.triton.common import INTERPRETED, dot

GROUP = 128
"""Inputs that are multiplied at once, of one block."""
STAGES = 3
TILE = 8
"""Groups of a token that a program quantizes."""
LARGEST = tl.constexpr(448.0)
"""Of an 8-bit float."""
HALF = tl.constexpr(256.0)
"""An 8-bit float is as many times the 16-bit float that its bits are shifted to."""


@triton.jit
def _from_codes(codes):
    """Codes (uint8) as float16, HALF times too small; NaN stays NaN."""
    wide = codes.to(tl.int16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    bits = tl.where((wide & 0x7F) == 0x7F, 0x7E00, bits.to(tl.int32)).to(tl.int16)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def _rounded(x):
    """x float32, at most LARGEST, to the nearest 8-bit float, as float32."""
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
    """Codes (uint8) of x float32, which 8-bit floats are exact for."""
    half = (x * (1.0 / 256.0)).to(tl.float16)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    codes = ((bits >> 8) & 0x80) | ((bits >> 7) & 0x7F)
    return tl.where(x == x, codes, 0x7F).to(tl.uint8)


@triton.jit
def _quantize_kernel(
    x, codes, scales, inputs, groups, x_row,
    GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """codes [tokens, inputs] uint8 and scales [tokens, groups] float32 of x [tokens, inputs]."""
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
def _linear_kernel(
    out, x, x_scales, codes, scales, bias, tokens, outputs, inputs, groups, blocks, x_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, FP8: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out [tokens, outputs] of x [tokens, inputs], with FP8 in codes with x_scales [tokens, groups]
    float32; the weight: codes [outputs, inputs], scales [.., blocks] float32 for blocks of ROWS
    outputs and COLUMNS groups; bias [outputs]."""
    rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < tokens, columns < outputs
    inner = tl.arange(0, GROUP)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(groups):
        at = group * GROUP + inner
        is_input = at < inputs
        a = tl.load(x + rows[:, None] * x_row + at[None, :], is_row[:, None] & is_input[None, :], 0)
        w = tl.load(
            codes + columns[None, :] * inputs + at[:, None],
            is_column[None, :] & is_input[:, None],
            0,
        )
        zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        scale = tl.load(scales + columns // ROWS * blocks + group // COLUMNS, is_column, 0.0)
        if FP8:
            if INTERPRETED:
                product = dot(_from_codes(a).to(tl.float32), _from_codes(w).to(tl.float32), zeros)
                product = product * (HALF * HALF)
            else:
                left = a.to(tl.float8e4nv, bitcast=True)
                product = dot(left, w.to(tl.float8e4nv, bitcast=True), zeros)
            share = tl.load(x_scales + rows * groups + group, is_row, 0.0)
            total += product * share[:, None] * scale[None, :]
        else:
            floats = _from_codes(w).to(tl.float32).to(a.dtype)
            total += dot(a, floats, zeros) * (scale * HALF)[None, :]
    if BIAS:
        total += tl.load(bias + columns, is_column, 0.0).to(tl.float32)[None, :]
    place = out + rows[:, None] * outputs + columns[None, :]
    tl.store(place, total.to(out.dtype.element_ty), is_row[:, None] & is_column[None, :])


@cache
def multiplies_fp8(device: torch.device) -> bool:
    """Whether a GPU's tensor cores multiply 8-bit floats."""
    return torch.cuda.get_device_capability(device) >= (8, 9)


def quantize(x: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Codes [tokens, inputs] uint8 and scales [tokens, groups of inputs] float32 of x [tokens,
    inputs]: each group of a token by its largest magnitude."""
    tokens, inputs = x.shape
    groups = triton.cdiv(inputs, group)
    codes = torch.empty(tokens, inputs, dtype=torch.uint8, device=x.device)
    scales = torch.empty(tokens, groups, dtype=torch.float32, device=x.device)
    if tokens:
        _quantize_kernel[(tokens, triton.cdiv(groups, TILE))](
            *(x, codes, scales, inputs, groups, x.stride(0)), GROUP=group, TILE=TILE
        )
    return codes, scales


def linear_fp8(
    x: Tensor,
    matrix: Fp8Matrix,
    bias: Tensor | None,
    out: Tensor | None = None,
    fp8: bool | None = None,
) -> Tensor:
    """As gllm.kernels.linear_fp8.linear_fp8; fp8: whether activations become 8-bit floats too,
    which is up to the GPU where it is not given.

    Raises ValueError for blocks whose width is none of 32, 64, a multiple of 128 and the weight's.
    """
    (tokens, inputs), outputs = x.shape, matrix.outputs
    width = triton.cdiv(inputs, GROUP) * GROUP if matrix.columns >= inputs else matrix.columns
    group = min(width, GROUP)
    if group not in (32, 64, GROUP) or width % group:
        raise ValueError(f"blocks of {matrix.columns} inputs are not implemented on GPUs")
    if out is None:
        out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    scales = matrix.scales
    fp8 = multiplies_fp8(x.device) if fp8 is None else fp8
    if fp8:
        x, scales = quantize(x, group)
    block_m, block_n, warps = _tiles(tokens)
    _linear_kernel[(triton.cdiv(outputs, block_n), triton.cdiv(tokens, block_m))](
        *(out, x, scales, matrix.codes.view(torch.uint8), matrix.scales),
        *(out if bias is None else bias, tokens, outputs, inputs, triton.cdiv(inputs, group)),
        *(matrix.scales.shape[1], x.stride(0)),
        ROWS=matrix.rows,
        COLUMNS=width // group,
        FP8=fp8,
        BIAS=bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        GROUP=group,
        num_warps=warps,
        num_stages=STAGES,
    )
    return out


def _tiles(tokens: int) -> tuple[int, int, int]:
    """Tokens and outputs of a program, and its warps."""
    if tokens <= 16:
        return 16, 32, 4
    return (32, 64, 4) if tokens <= 32 else (64, 128, 8)


def _compiled(label: str, tokens: int, floats: str, fp8: bool, bias: bool) -> Compiled:
    block_m, block_n, warps = _tiles(tokens)
    tensors = {
        "out": f"*{floats}",
        "x": "*u8" if fp8 else f"*{floats}",
        "x_scales": "*fp32",
        "codes": "*u8",
        "scales": "*fp32",
        "bias": f"*{floats}",
    }
    numbers = ("tokens", "outputs", "inputs", "groups", "blocks", "x_row")
    constants = {"ROWS": 128, "COLUMNS": 1, "FP8": fp8, "BIAS": bias, "GROUP": GROUP}
    return Compiled(
        label=f"{label}, {floats}, {'8-bit' if fp8 else '16-bit'} products",
        kernel=_linear_kernel,
        signature=tensors | dict.fromkeys(numbers, "i32"),
        constants=constants | {"BLOCK_M": block_m, "BLOCK_N": block_n},
        warps=warps,
        stages=STAGES,
        tensor_cores=True,
        least=89 if fp8 else 80,
        aligned=(*tensors, "outputs", "inputs", "x_row"),
    )


COMPILED = [
    *(
        _compiled(label, tokens, floats, fp8, floats == "bf16")
        for label, tokens in (("decode", 16), ("small batch", 32), ("prefill", 64))
        for floats in ("bf16", "fp16")
        for fp8 in (False, True)
    ),
    *(
        Compiled(
            label=f"activations to 8 bits, {floats}",
            kernel=_quantize_kernel,
            signature={
                "x": f"*{floats}",
                "codes": "*u8",
                "scales": "*fp32",
                **dict.fromkeys(("inputs", "groups", "x_row"), "i32"),
            },
            constants={"GROUP": GROUP, "TILE": TILE},
            aligned=("x", "codes", "scales", "inputs", "x_row"),
        )
        for floats in ("bf16", "fp16")
    ),
]
