"""Basic layers with their weights: linear layer and norm. The arithmetic is in gllm/kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gllm.kernels.grouped_weight import GroupedWeight, reorder_outputs
from gllm.kernels.layer_norm import layer_norm
from gllm.kernels.linear import linear, prepare, row_magnitudes, scales_rows
from gllm.kernels.residual import add_to
from gllm.kernels.rms_norm import add_rms_norm, rms_norm
from gllm.kernels.weight_format import (
    UNQUANTIZED,
    Matrix,
    Weight,
    dequantize_weight,
    weight_format,
)
from gllm.models.loader import Weights
from gllm.models.spec.parts import LinearSpec, NormSpec

SLAB_ROWS = 1024
"""Rows per slab: magnitudes of a weight are computed slab by slab to save memory."""


def read_projections(
    spec: LinearSpec, weights: Weights, outputs: Sequence[int], inputs: int
) -> list[Tensor]:
    """Read the weights of several projections, such as q, k and v, in floating point.

    Quantized weights are dequantized.

    Args:
        spec: tensor names of a linear layer.
        weights: tensors of the layer.
        outputs: number of outputs of each projection.
        inputs: number of inputs.

    Returns:
        A tensor [outputs, inputs] per projection, or a single one if the spec has one name. Callers
        copy them: they may be memory-mapped.
    """
    names = spec.names
    rows = [sum(outputs)] if len(names) == 1 else outputs
    if spec.is_transposed:
        return [weights.read(f"{names[0]}.weight", inputs, sum(rows)).t().contiguous()]
    return weights.read_parts(names, "weight", rows, inputs)


def read_matrices(
    spec: LinearSpec, weights: Weights, outputs: Sequence[int], inputs: int
) -> Sequence[Weight]:
    """Read the weights of several projections, in the checkpoint's quantized format where possible.

    Weights are returned in floating point, as by `read_projections`, if the kernels do not support
    the format.

    Args:
        spec: tensor names of a linear layer.
        weights: tensors of the layer.
        outputs: number of outputs of each projection.
        inputs: number of inputs.
    """
    if spec.is_transposed:
        return read_projections(spec, weights, outputs, inputs)
    rows = [sum(outputs)] if len(spec.names) == 1 else outputs
    return weights.read_matrices(spec.names, rows, inputs)


def read_row_magnitudes(spec: LinearSpec, weights: Weights, outputs: Sequence[int]) -> Tensor:
    """Return the largest absolute weight of each output, over the inputs of all ranks.

    With it, a tensor parallel rank quantizes its inputs with the scales of the whole weight. Whole
    tensors are read.

    Args:
        spec: a linear layer whose inputs are divided over the ranks.
        weights: tensors of the layer.
        outputs: number of outputs of each projection.

    Returns:
        [sum of outputs] float32.
    """
    assert spec.columns is not None, "the rows of other layers are whole"
    inputs = spec.columns.size
    rows = [sum(outputs)] if len(spec.names) == 1 else outputs
    if spec.is_transposed:
        parts = [weights.read_whole(f"{spec.names[0]}.weight", inputs, rows[0]).t()]
    else:
        pairs = zip(spec.names, rows, strict=True)
        parts = [weights.read_whole(f"{name}.weight", count, inputs) for name, count in pairs]
    slabs = [slab for part in parts for slab in part.split(SLAB_ROWS)]
    return torch.cat([slab.abs().amax(dim=1).to(torch.float32) for slab in slabs])


def read_bias(spec: LinearSpec, weights: Weights, outputs: Sequence[int]) -> Tensor | None:
    """Read the biases of several projections, concatenated [sum of outputs]; None if without."""
    rows = [sum(outputs)] if len(spec.names) == 1 else outputs
    return weights.read_stacked(spec.names, "bias", rows) if spec.has_bias else None


def read_matrix(
    spec: LinearSpec,
    weights: Weights,
    outputs: Sequence[int],
    inputs: int,
    is_exact: bool = False,
) -> Matrix:
    """Read the weights of several projections, stacked and prepared for the `linear` kernel.

    Args:
        spec: tensor names of a linear layer.
        weights: tensors of the layer.
        outputs: number of outputs of each projection.
        inputs: number of inputs.
        is_exact: True to exempt the weights from `--quantization`.
    """
    quantization = UNQUANTIZED if is_exact else weights.quantization
    parts = read_matrices(spec, weights, outputs, inputs)
    magnitudes = None
    if spec.columns is not None and weight_format(quantization).scales_rows:
        # Scales are those of whole rows: the ranks' codes are those of the whole weight.
        magnitudes = read_row_magnitudes(spec, weights, outputs)
    return prepare(parts, quantization, magnitudes)


class Linear:
    """Linear layer y = x W^T + b; W is stacked from several projections, such as q, k and v."""

    def __init__(
        self,
        spec: LinearSpec,
        weights: Weights,
        outputs: Sequence[int],
        inputs: int,
        orders: Sequence[Tensor | None] = (),
        is_exact: bool = False,
    ) -> None:
        """Read the weights.

        Args:
            spec: tensor names and variant.
            weights: tensors of the layer.
            outputs: number of outputs of each projection.
            inputs: number of inputs.
            orders: stored index of each output, [outputs] int64, for each tensor; None for those
                of a tensor in order, empty if all are.
            is_exact: True to exempt the layer from `--quantization`.
        """
        self._ranks, self._is_summed = weights.ranks, spec.is_summed
        self._has_part_of_inputs = spec.columns is not None
        self.outputs = sum(outputs)
        self.bias = read_bias(spec, weights, outputs)
        if self._has_part_of_inputs and not self._is_summed and self._ranks.rank > 0:
            # Somebody else adds the ranks' outputs: the bias counts once.
            self.bias = None
        if not any(order is not None for order in orders):
            self.matrix = read_matrix(spec, weights, outputs, inputs, is_exact)
            return
        parts = read_matrices(spec, weights, outputs, inputs)
        self.matrix = prepare(
            _reorder(parts, orders), UNQUANTIZED if is_exact else weights.quantization
        )
        if self.bias is not None:
            rows = [self.outputs] if len(spec.names) == 1 else list(outputs)
            pairs = zip(self.bias.split(rows), orders, strict=True)
            biases = [bias if order is None else bias[order] for bias, order in pairs]
            self.bias = torch.cat(biases)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return y [tokens, outputs] of x [tokens, inputs].

        Where this rank has a part of the inputs, y is the sum of all ranks if the spec says so;
        otherwise it is this rank's addend.

        Args:
            x: [tokens, inputs].
            out: receives the result if given, unless it is a sum: contiguous, of x's dtype or
                float32.
        """
        if not self._has_part_of_inputs:
            return linear(x, self.matrix, self.bias, out)
        group, magnitudes = self._ranks.layers, None
        if scales_rows(self.matrix):
            magnitudes = group.maximum(row_magnitudes(x, self.matrix))
        if not self._is_summed:
            return linear(x, self.matrix, self.bias, out, magnitudes)
        part = group.partial(len(x), self.outputs)
        part = linear(x, self.matrix, None, part, magnitudes)
        return group.sum(part, self.bias, x.dtype)


def _reorder(parts: Sequence[Weight], orders: Sequence[Tensor | None]) -> list[Weight]:
    """Return weights with the outputs of each in its order, quantized only in few bits."""
    is_grouped = all(isinstance(part, GroupedWeight) for part in parts)
    ordered: list[Weight] = []
    for part, order in zip(parts, orders, strict=True):
        weight = part if is_grouped else dequantize_weight(part)
        if order is None:
            ordered.append(weight)
        elif isinstance(weight, GroupedWeight):
            ordered.append(reorder_outputs(weight, order))
        else:
            ordered.append(dequantize_weight(weight)[order])
    return ordered


class Norm:
    """RMSNorm or LayerNorm over the last dimension."""

    def __init__(self, spec: NormSpec, weights: Weights, *shape: int) -> None:
        """Read the scale and the bias, if any, both of the given shape."""
        if spec.has_weight:
            self.weight = weights.read(f"{spec.name}.weight", *shape)
        else:
            self.weight = weights.ones(*shape)
        if spec.offset:
            # The compute dtype would round the sum: it stays in float32.
            self.weight = self.weight.to(torch.float32) + spec.offset
        self.bias = weights.read(f"{spec.name}.bias", *shape) if spec.has_bias else None
        self.kind, self.eps = spec.kind, spec.eps

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., *shape], of the same shape."""
        if self.kind == "rms":
            return rms_norm(x, self.weight, self.eps)
        return layer_norm(x, self.weight, self.bias, self.eps)

    def add_and_normalize(self, hidden: Tensor, delta: Tensor | None) -> Tensor:
        """Add a sublayer's output to the residual stream in place, and return the sum normalized.

        Args:
            hidden: residual stream [tokens, size]; holds the sum afterwards.
            delta: output of the previous sublayer, [tokens, size]; None to normalize `hidden` as it
                is.
        """
        if delta is None:
            return self(hidden)
        if self.kind == "rms":
            return add_rms_norm(hidden, delta, self.weight, self.eps)
        return self(add_to(hidden, delta))


def optional_norm(spec: NormSpec | None, weights: Weights, *shape: int) -> Norm | None:
    """Read the weights of a norm and return it; return None if `spec` is None."""
    return None if spec is None else Norm(spec, weights, *shape)
