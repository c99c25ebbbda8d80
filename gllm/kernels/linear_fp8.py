"""Linear layers with weights in 8-bit floating point (e4m3) and one scale per block.

On GPUs `triton.linear_fp8` multiplies by the codes. On CPUs weights are converted to floats at
every call, which is for correctness.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), section 3 (e4m3); DeepSeek-AI,
"DeepSeek-V3 Technical Report" (2024), section 3.3.2 (scales of blocks of 128 x 128).
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.fp8_weights import Fp8Matrix, Fp8Stack
from gllm.kernels.weight_format import WeightFormat, stack_tensors

SLAB_OUTPUTS = 1024
"""Outputs that are converted to floats at once, unless one row of blocks has more."""


class Fp8Format(WeightFormat[Fp8Matrix]):
    """FP8 (E4M3) weights as checkpoints store them, with one scale per tensor, output or block."""

    def dequantize(self, matrix: Fp8Matrix) -> Tensor:
        """Return the floats [outputs, inputs] in the matrix's dtype."""
        return dequantize(matrix)

    def prepare(self, parts: Sequence[Fp8Matrix], magnitudes: Tensor | None = None) -> Fp8Matrix:
        """Concatenate FP8 weights along the outputs into one matrix.

        Raises:
            ValueError: the parts have blocks of different widths.
        """
        return stack_fp8(parts)

    def multiply(
        self,
        x: Tensor,
        matrix: Fp8Matrix,
        bias: Tensor | None,
        out: Tensor | None,
        magnitudes: Tensor | None = None,
    ) -> Tensor:
        """Return x W^T + b, [tokens, outputs]; the arguments are as in `WeightFormat.multiply`."""
        return linear_fp8(x, matrix, bias, out)

    def stack(self, num_experts: int, experts: Iterable[Sequence[Fp8Matrix]]) -> Fp8Stack:
        """Stack the FP8 weights of all experts. Raises ValueError if their blocks differ."""
        first: Fp8Matrix | None = None
        scales: list[Tensor] = []

        def expert_codes() -> Iterator[Tensor]:
            nonlocal first
            for parts in experts:
                matrix = stack_fp8(parts)
                first = first or matrix
                if (matrix.rows, matrix.columns) != (first.rows, first.columns):
                    raise ValueError("experts of one layer have blocks of different sizes")
                scales.append(matrix.scales)
                yield matrix.codes.view(torch.uint8)

        codes = stack_tensors(num_experts, expert_codes())
        assert first is not None, "there is at least one expert"
        return Fp8Stack(
            codes.view(first.codes.dtype),
            torch.stack(scales),
            first.rows,
            first.columns,
            first.dtype,
        )

    def select_expert(self, stack: Fp8Stack, expert: int) -> Fp8Matrix:
        """Return the weight of one expert of a stack."""
        return stack[expert]


def prepare_fp8(
    codes: Tensor, scales: Tensor, block: tuple[int, int] | None, dtype: torch.dtype
) -> Fp8Matrix:
    """Build an FP8 weight from float8_e4m3fn codes and their scales.

    Args:
        codes: FP8 value of each weight before scaling, [outputs, inputs].
        scales: factors of the codes, finite and not negative. With blocks: [block rows, block
            columns]. Without: one element for the whole weight, or one per output.
        block: (outputs, inputs) of a block that shares a scale; None without blocks.
        dtype: dtype of the dequantized weight.

    Raises:
        ValueError: the scales have another shape or are not valid.
    """
    outputs, inputs = codes.shape
    if block is None:
        if scales.numel() not in (1, outputs):
            raise ValueError(f"has {scales.numel()} scales, but 1 or {outputs} are needed")
        block = (outputs if scales.numel() == 1 else 1, inputs)
        scales = scales.reshape(-1, 1)
    shape = (-(-outputs // block[0]), -(-inputs // block[1]))
    if tuple(scales.shape) != shape:
        raise ValueError(
            f"has scales of shape {tuple(scales.shape)}, but blocks of {block[0]} x {block[1]} "
            f"need {shape}"
        )
    is_float = scales.is_floating_point()
    scales = scales.to(torch.float32)
    if not is_float or not bool((scales.isfinite() & (scales >= 0)).all()):
        raise ValueError("has scales that are no floats, negative or not finite")
    return Fp8Matrix(codes, scales, *block, dtype)


def dequantize(matrix: Fp8Matrix) -> Tensor:
    """Convert an FP8 weight to floats [outputs, inputs] in its dtype.

    Each element is its code times the scale of its block, computed in float32 and then rounded.
    """
    outputs, inputs = matrix.codes.shape
    weight = torch.empty(outputs, inputs, dtype=matrix.dtype, device=matrix.codes.device)
    step = max(SLAB_OUTPUTS // matrix.rows, 1) * matrix.rows
    for begin in range(0, outputs, step):
        codes = matrix.codes[begin : begin + step].to(torch.float32)
        scales = matrix.scales[begin // matrix.rows : (begin + step) // matrix.rows + 1]
        scales = scales.repeat_interleave(matrix.rows, dim=0)[: len(codes)]
        scales = scales.repeat_interleave(matrix.columns, dim=1)[:, :inputs]
        weight[begin : begin + step] = codes.mul_(scales)
    return weight


def stack_fp8(parts: Sequence[Fp8Matrix]) -> Fp8Matrix:
    """Concatenate FP8 weights [outputs, inputs] along the outputs, for example gate and up.

    The result's blocks are small enough that each lies within one block of one part.

    Raises:
        ValueError: the parts have blocks of different widths.
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
    """Apply a linear layer with an FP8 weight: return x W^T + b, [tokens, outputs].

    Args:
        x: [tokens, inputs].
        matrix: W [outputs, inputs].
        bias: b [outputs].
        out: receives the result if given: contiguous, of x's dtype or float32.
    """
    if x.is_cuda:
        from gllm.kernels.triton import linear_fp8 as on_gpu

        return on_gpu.linear_fp8(x, matrix, bias, out)
    # A part of a sum is not rounded to the dtype of x.
    dtype = x.dtype if out is None else out.dtype
    bias = None if bias is None else bias.to(dtype)
    result = functional.linear(x.to(dtype), dequantize(matrix).to(dtype), bias)
    return result if out is None else out.copy_(result)
