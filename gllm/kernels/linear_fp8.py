"""Linear maps by weights in 8-bit floating point (e4m3), a scale for each block.

Owns what the codes stand for, and how parts become one weight: blocks of different parts may end in
different places. On GPUs triton/linear_fp8.py multiplies by the codes; without one they are turned
into floats at every call, which is for correctness. Does not know where weights come from.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), section 3 (e4m3); DeepSeek-AI,
"DeepSeek-V3 Technical Report" (2024), section 3.3.2 (scales of blocks of 128 x 128).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.fp8_weights import Fp8Matrix

SLAB = 1024
"""Outputs that are turned into floats at once, or one row of blocks."""


def prepare_fp8(
    codes: Tensor, scales: Tensor, block: tuple[int, int] | None, dtype: torch.dtype
) -> Fp8Matrix:
    """The weight of codes [outputs, inputs] float8_e4m3fn.

    scales, finite and not negative: one for each block (outputs, inputs) of this size; without one
    a single number, or one for each output. Raises ValueError where they are anything else.
    """
    outputs, inputs = codes.shape
    if block is None:
        if scales.numel() not in (1, outputs):
            raise ValueError(f"has {scales.numel()} scales, but 1 or {outputs} are needed")
        block = (outputs if scales.numel() == 1 else 1, inputs)
        scales = scales.reshape(-1, 1)
    wanted = (-(-outputs // block[0]), -(-inputs // block[1]))
    if tuple(scales.shape) != wanted:
        raise ValueError(
            f"has scales of shape {tuple(scales.shape)}, but blocks of {block[0]} x {block[1]} "
            f"need {wanted}"
        )
    floating = scales.is_floating_point()
    scales = scales.to(torch.float32)
    if not floating or not bool((scales.isfinite() & (scales >= 0)).all()):
        raise ValueError("has scales that are no floats, negative or not finite")
    return Fp8Matrix(codes, scales, *block, dtype)


def dequantize(matrix: Fp8Matrix) -> Tensor:
    """The weight [outputs, inputs] in its dtype; products in float32."""
    outputs, inputs = matrix.codes.shape
    made = torch.empty(outputs, inputs, dtype=matrix.dtype, device=matrix.codes.device)
    step = max(SLAB // matrix.rows, 1) * matrix.rows
    for begin in range(0, outputs, step):
        codes = matrix.codes[begin : begin + step].to(torch.float32)
        scales = matrix.scales[begin // matrix.rows : (begin + step) // matrix.rows + 1]
        scales = scales.repeat_interleave(matrix.rows, dim=0)[: len(codes)]
        scales = scales.repeat_interleave(matrix.columns, dim=1)[:, :inputs]
        made[begin : begin + step] = codes.mul_(scales)
    return made


def stack_fp8(parts: Sequence[Fp8Matrix]) -> Fp8Matrix:
    """One weight of parts [outputs, inputs] of the same inputs and type, one below the other.

    Its blocks are as small as needed for none to lie in two parts, or in two blocks of one.
    Raises ValueError where parts have blocks of different widths.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    inputs = first.codes.shape[1]
    if any(min(part.columns, inputs) != min(first.columns, inputs) for part in parts):
        raise ValueError("parts of one weight have blocks of different numbers of inputs")
    starts = [sum(part.outputs for part in parts[:index]) for index in range(len(parts))]
    rows = math.gcd(*starts, *(part.rows for part in parts if part.outputs > part.rows))
    scales = [
        part.scales.repeat_interleave(-(-part.rows // rows), dim=0)[: -(-part.outputs // rows)]
        for part in parts
    ]
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts])
    return Fp8Matrix(
        codes.view(first.codes.dtype), torch.cat(scales), rows, first.columns, first.dtype
    )


def linear_fp8(
    x: Tensor, matrix: Fp8Matrix, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """x W^T + b: x [tokens, inputs], bias [outputs]; the result [tokens, outputs].

    out [tokens, outputs]: where it goes instead, of x's dtype or float32, contiguous.
    """
    if x.is_cuda:
        from gllm.kernels.triton import linear_fp8 as on_gpu

        return on_gpu.linear_fp8(x, matrix, bias, out)
    result = functional.linear(x, dequantize(matrix).to(x.dtype), bias)
    return result if out is None else out.copy_(result)
