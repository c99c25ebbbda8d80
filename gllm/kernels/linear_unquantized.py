"""Linear layers with floating-point weights.

Where compiled kernels exist, a weight is packed into the panels that they read, once, and the
original is dropped. Otherwise torch multiplies by the weight as it is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.native.library import (
    ACTIVATIONS,
    LinearArguments,
    PackArguments,
    UnpackArguments,
    library_for,
)
from gllm.kernels.native.program import make_contiguous
from gllm.kernels.weight_format import UNQUANTIZED, WeightFormat, stack_tensors

PANEL_OUTPUTS = 16
"""Outputs per panel, as in linear.cpp."""


@dataclass(frozen=True, slots=True)
class UnquantizedMatrix:
    """Unquantized weight [outputs, inputs], plain or packed for the compiled CPU kernels."""

    format: ClassVar[str] = UNQUANTIZED
    weight: Tensor
    """[outputs, inputs]; if is_packed, in panels: groups of outputs with contiguous weights."""
    outputs: int
    """Number of outputs; panels may hold more."""
    is_packed: bool
    """True if the weight is packed for the compiled CPU kernels."""
    is_gated: bool = False
    """True if panels of a gate and of an up projection alternate, `outputs` of each."""

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes."""
        return self.weight.nbytes


class UnquantizedFormat(WeightFormat[UnquantizedMatrix]):
    """Floating-point weights, packed for the compiled CPU kernels or multiplied by torch."""

    has_lookup = True

    def dequantize(self, matrix: Any) -> Tensor:
        """Return a loaded weight unchanged, as it is a plain tensor."""
        assert isinstance(matrix, Tensor), "loaded weights are not packed yet"
        return matrix

    def prepare(
        self, parts: Sequence[Tensor], magnitudes: Tensor | None = None
    ) -> UnquantizedMatrix:
        """Concatenate parts [outputs, inputs] into one matrix, packed for compiled kernels.

        Without a kernel for the weight, the result is a plain copy.
        """
        return _pack_parts(parts) or wrap_weight(torch.cat(list(parts)))

    def prepare_gated(self, parts: Sequence[Tensor], activation: str) -> UnquantizedMatrix:
        """Merge the gate and up projections into one matrix for `multiply_gated`.

        If a compiled kernel can use it, panels (groups of outputs) of gate and up alternate.
        """
        fused = _pack_gated(parts[0], parts[1]) if activation in ACTIVATIONS else None
        return fused or self.prepare(parts)

    def multiply(
        self,
        x: Tensor,
        matrix: UnquantizedMatrix,
        bias: Tensor | None,
        out: Tensor | None,
        magnitudes: Tensor | None = None,
    ) -> Tensor:
        """Return x W^T + b, [tokens, outputs]; the arguments are as in `WeightFormat.multiply`."""
        if matrix.is_packed:
            return _multiply_packed(x, matrix, bias, out)
        result = functional.linear(x, matrix.weight, bias)
        return result if out is None else out.copy_(result)

    def multiply_gated(
        self, x: Tensor, matrix: UnquantizedMatrix, bias: Tensor | None, activation: str
    ) -> Tensor:
        """Return act(gate(x)) * up(x), [tokens, outputs]."""
        if matrix.is_gated:
            return _multiply_packed(x, matrix, bias, None, ACTIVATIONS[activation])
        return WeightFormat.multiply_gated(self, x, matrix, bias, activation)

    def lookup(self, matrix: UnquantizedMatrix, ids: Tensor) -> Tensor:
        """Return rows of the weight: ids [n] int64 to [n, inputs]. Raises IndexError."""
        if matrix.is_packed:
            return _unpack_rows(matrix, ids)
        return functional.embedding(ids, matrix.weight)

    def unpack(self, matrix: UnquantizedMatrix) -> Tensor:
        """Return the weight [outputs, inputs], the gate's outputs first."""
        if not matrix.is_packed:
            return matrix.weight
        rows = torch.arange(matrix.outputs)
        if not matrix.is_gated:
            return _unpack_rows(matrix, rows)
        # Panels of gate and up projection alternate.
        gate = rows + rows // PANEL_OUTPUTS * PANEL_OUTPUTS
        panels = UnquantizedMatrix(matrix.weight, len(matrix.weight), True)
        return _unpack_rows(panels, torch.cat([gate, gate + PANEL_OUTPUTS]))

    def stack(self, num_experts: int, experts: Iterable[Sequence[Tensor]]) -> Tensor:
        """Stack the weights of all experts as one tensor [experts, outputs, inputs]."""
        return stack_tensors(num_experts, (torch.cat(list(parts)) for parts in experts))

    def select_expert(self, stack: Tensor, expert: int) -> UnquantizedMatrix:
        """Return the weight of one expert of a stack."""
        return wrap_weight(stack[expert])


def wrap_weight(weight: Tensor) -> UnquantizedMatrix:
    """Wrap a weight [outputs, inputs] as an `UnquantizedMatrix` without copying it."""
    return UnquantizedMatrix(weight, len(weight), False)


def pack_weight(weight: Tensor) -> UnquantizedMatrix | None:
    """Return a copy of weight [outputs, inputs] packed for the compiled CPU kernels.

    Returns None if no compiled kernel can use it. Packed weights are stored in panels: groups of
    outputs whose weights are contiguous in memory.
    """
    return _pack_parts([weight])


def _pack_parts(parts: Sequence[Tensor]) -> UnquantizedMatrix | None:
    """Return the parts, stacked, in panels; None if no compiled kernel reads them."""
    if any(len(part) % PANEL_OUTPUTS for part in parts[:-1]):
        parts = [torch.cat(list(parts))]
    outputs = sum(map(len, parts))
    panels = _allocate_panels(parts[0], outputs)
    if panels is None:
        return None
    begin = 0
    for part in parts:
        _pack(part, panels[begin:])
        begin += len(part)
    return UnquantizedMatrix(panels, outputs, True)


def _pack_gated(gate: Tensor, up: Tensor) -> UnquantizedMatrix | None:
    """Return two weights [outputs, inputs] in alternating panels; None without such kernels."""
    padded = -(-len(gate) // PANEL_OUTPUTS) * PANEL_OUTPUTS
    panels = _allocate_panels(gate, 2 * padded)
    if panels is None:
        return None
    _pack(gate, panels, step=2)
    _pack(up, panels[PANEL_OUTPUTS:], step=2)
    return UnquantizedMatrix(panels, len(gate), True, is_gated=True)


def _allocate_panels(like: Tensor, outputs: int) -> Tensor | None:
    """Return unwritten panels for a number of outputs; None if no compiled kernel reads them."""
    if library_for(like, "linear") is None:
        return None
    # Two neighbouring bfloat16 are multiplied at once.
    if like.dtype == torch.bfloat16 and like.shape[1] % 2:
        return None
    rows = -(-outputs // PANEL_OUTPUTS) * PANEL_OUTPUTS
    return torch.empty(rows, like.shape[1], dtype=like.dtype)


def _pack(weight: Tensor, panels: Tensor, step: int = 1) -> None:
    """Write a weight into every panel, or into every second one with step 2."""
    library = library_for(weight, "linear")
    assert library is not None, "panels exist only with compiled kernels"
    outputs, inputs = weight.shape
    weight = weight.contiguous()
    library(PackArguments(panels, weight, inputs, outputs, step, weight.dtype))


def _multiply_packed(
    x: Tensor,
    matrix: UnquantizedMatrix,
    bias: Tensor | None,
    out: Tensor | None,
    activation: int = 0,
) -> Tensor:
    """Multiply by panels.

    Args:
        x: [tokens, inputs].
        matrix: a packed weight.
        bias: [outputs], or [2 * outputs] with an activation.
        out: receives the result if given.
        activation: a value of ACTIVATIONS if the matrix is gated, 0 otherwise.
    """
    library = library_for(x, "linear")
    assert library is not None, "packed by compiled kernels"
    assert matrix.is_gated == bool(activation), "an activation requires gated panels"
    if x.stride(1) != 1:
        x = make_contiguous(x)
    if out is None:
        out = library.empty((len(x), matrix.outputs), x.dtype)
    library(
        LinearArguments(
            *(out, x, matrix.weight, bias),
            *(*x.shape, matrix.outputs, x.stride(0)),
            *(activation, out.dtype == torch.float32, x.dtype),
        )
    )
    return out


def _unpack_rows(matrix: UnquantizedMatrix, ids: Tensor) -> Tensor:
    """Return rows of a packed weight, [n, inputs]."""
    library, inputs = library_for(matrix.weight, "linear"), matrix.weight.shape[1]
    assert library is not None, "packed by compiled kernels"
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < matrix.outputs:
        raise IndexError(f"a row index is outside the weight's {matrix.outputs} rows")
    rows = torch.empty(len(ids), inputs, dtype=matrix.weight.dtype)
    library(UnpackArguments(rows, matrix.weight, ids, *rows.shape, rows.dtype))
    return rows
