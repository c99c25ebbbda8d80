"""RMSNorm for GPUs, with and without a preceding residual addition.

Each row is read once and kept in registers. Formula and source: gllm/kernels/rms_norm.py.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.triton.kernel_specs import KernelSpec, TunedConstants
from gllm.kernels.triton.tiles import choose_tiles

LONGEST = 16384
"""Largest supported number of elements per row, limited by registers."""


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x, delta, weight, output, rows, size, x_row, delta_row, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize ROWS rows; with ADD, x becomes x + delta first.

    Grid: (rows / ROWS,). x and delta [rows, size], x_row and delta_row elements between rows;
    weight [size]; output [rows, size], contiguous. BLOCK: next power of two of size.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    there = (row < rows) & (column < size)
    value = tl.load(x + row * x_row + column, there, 0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + row * delta_row + column, there, 0.0).to(tl.float32)
        # What is normalised is the sum as it is kept.
        summed = value.to(x.dtype.element_ty)
        tl.store(x + row * x_row + column, summed, there)
        value = summed.to(tl.float32)
    mean = tl.sum(value * value, axis=1, keep_dims=True) / size
    scale = tl.load(weight + column, column < size, 0.0).to(tl.float32)
    normed = value * (1.0 / tl.sqrt(mean + eps)) * scale
    tl.store(output + row * size + column, normed.to(output.dtype.element_ty), there)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm to x [..., n] with weight [n] on a GPU; the result has x's shape and dtype.

    Raises:
        ValueError: A row has more than LONGEST elements.
    """
    flat = x.reshape(-1, x.shape[-1])
    return _launch(flat, None, weight, eps).view(x.shape)


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add delta to the residual stream `hidden` in place; return the RMSNorm of the sum (Triton).

    hidden and delta are [tokens, n]; weight is [n].

    Raises:
        ValueError: A row has more than LONGEST elements, or the rows of hidden are not contiguous.
    """
    if hidden.stride(-1) != 1:
        raise ValueError("a row of hidden has gaps")
    return _launch(hidden, delta, weight, eps)


def _launch(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    rows, size = x.shape
    if size > LONGEST:
        raise ValueError(f"rows of {size} are longer than {LONGEST}")
    x = x if x.stride(1) == 1 else x.contiguous()
    if delta is not None and delta.stride(1) != 1:
        delta = delta.contiguous()
    # Without a sum the second pointer is never read.
    added = x if delta is None else delta
    output = x.new_empty(rows, size)
    if rows:
        use = choose_tiles("rms_norm", size=size)
        constants = _constants(size, delta is not None, use)
        grid = (triton.cdiv(rows, constants["ROWS"]),)
        strides = (x.stride(0), added.stride(0))
        arguments = (x, added, weight.contiguous(), output, rows, size, *strides, eps)
        _rms_norm[grid](*arguments, **constants, num_warps=use["warps"])
    return output


def _constants(size: int, add: bool, use: Mapping[str, int]) -> dict[str, Any]:
    """Return the constants for rows of a length; short rows share a program."""
    block = triton.next_power_of_2(size)
    return {"ADD": add, "ROWS": max(use["elements"] // block, 1), "BLOCK": block}


def _compiled(label: str, size: int, add: bool, kind: str, scale: str) -> KernelSpec:
    tensors = {"x": f"*{kind}", "delta": f"*{kind}", "weight": f"*{scale}", "output": f"*{kind}"}
    numbers = dict.fromkeys(("rows", "size", "x_row", "delta_row"), "i32") | {"eps": "fp32"}
    aligned = (*tensors, "size", "x_row", "delta_row")
    tiled = TunedConstants("rms_norm", {"size": size}, lambda use: _constants(size, add, use))
    return KernelSpec(label, _rms_norm, tensors | numbers, {}, aligned=aligned, tuned=tiled)


KERNEL_SPECS = [
    _compiled("sum, rows of 3584, bf16", 3584, True, "bf16", "bf16"),
    _compiled("sum, rows of 4096, fp16", 4096, True, "fp16", "fp16"),
    _compiled("sum, rows of 8192, bf16", 8192, True, "bf16", "bf16"),
    _compiled("sum, rows of 16384, bf16", LONGEST, True, "bf16", "fp32"),
    _compiled("rows of 3584, bf16", 3584, False, "bf16", "bf16"),
    _compiled("rows of 4096, fp16", 4096, False, "fp16", "fp32"),
    _compiled("rows of 128, bf16", 128, False, "bf16", "bf16"),
    _compiled("rows of 4096, float32", 4096, True, "fp32", "fp32"),
]
