"""Linear layers with weights of few bits: integers in groups with a scale, and maybe a minimum.

What such a weight is and how floats become one is in `grouped_weight`; `grouped_panels` multiplies
by it on CPUs, with activations of 8 bits. On GPUs weights become floats of the activations' dtype,
a tile at a time (`grouped_words`, `triton.linear_grouped`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gllm.kernels.grouped_panels import (
    PackedPart,
    join_panels,
    lookup_panels,
    multiply_panels,
    pack,
)
from gllm.kernels.grouped_weight import (
    PANEL_OUTPUTS,
    GroupedWeight,
    dequantize_rows,
    quantize_to_4_bits,
    quantize_to_8_bits,
    restore_order,
)
from gllm.kernels.grouped_words import GroupedStack, GroupedWords, pack_for_gpu, stack_words
from gllm.kernels.native.library import ACTIVATIONS, library_for
from gllm.kernels.native.program import make_contiguous
from gllm.kernels.threads import using_torch_threads
from gllm.kernels.weight_format import WeightFormat

DEVICES = ("cpu", "cuda")
"""Types of devices with kernels for weights of few bits."""


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """Weight [outputs, inputs] of few bits, packed; parts follow each other along the outputs."""

    format: ClassVar[str] = "grouped"
    parts: tuple[PackedPart | GroupedWords, ...]
    """GroupedWords on a GPU."""
    dtype: torch.dtype
    """Dtype of the rows that `lookup` returns."""

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes."""
        return sum(part.nbytes for part in self.parts)

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return sum(part.outputs for part in self.parts)


class GroupedFormat(WeightFormat[GroupedMatrix]):
    """Weights of few bits, as files store them."""

    has_lookup = True

    def dequantize(self, matrix: Any) -> Tensor:
        """Convert a loaded weight to floats [outputs, inputs]."""
        assert isinstance(matrix, GroupedWeight), "loaded weights are not packed yet"
        rows = matrix.read(0, matrix.shape[0])
        floats = dequantize_rows(rows, matrix.layout).to(matrix.dtype)
        return restore_order(floats, matrix.order).to(matrix.device)

    def prepare(self, parts: Sequence[Any], magnitudes: Tensor | None = None) -> GroupedMatrix:
        """Pack weights for `multiply`, each a GroupedWeight; see `WeightFormat.prepare`."""
        if parts[0].device.type != "cpu":
            return GroupedMatrix(tuple(pack_for_gpu(parts)), parts[0].dtype)
        # Threads of torch wait for each other at each of many small operations, which takes minutes
        # instead of seconds where other programs use the cores.
        with using_torch_threads(1):
            return GroupedMatrix(tuple(join_panels([*map(pack, parts)])), parts[0].dtype)

    def multiply(
        self,
        x: Tensor,
        matrix: GroupedMatrix,
        bias: Tensor | None,
        out: Tensor | None,
        magnitudes: Tensor | None = None,
    ) -> Tensor:
        """Return x W^T + b, [tokens, outputs]; the arguments are as in `WeightFormat.multiply`."""
        return linear_grouped(x, matrix, bias, out)

    def multiply_gated(
        self, x: Tensor, matrix: GroupedMatrix, bias: Tensor | None, activation: str
    ) -> Tensor:
        """Return act(gate(x)) * up(x), [tokens, outputs], in one kernel where there is one.

        The bits are those of the two kernels one after the other.
        """
        part, gate = matrix.parts[0], ACTIVATIONS.get(activation)
        is_whole = len(matrix.parts) == 1 and part.outputs % (2 * PANEL_OUTPUTS) == 0
        if gate is None or not is_whole or not isinstance(part, PackedPart):
            return super().multiply_gated(x, matrix, bias, activation)
        library = library_for(x, "linear_grouped")
        if library is None or library_for(x, "gate") is None:
            return super().multiply_gated(x, matrix, bias, activation)
        out = library.empty((len(x), part.outputs // 2), x.dtype)
        multiply_panels(make_contiguous(x), part, bias, out, gate)
        return out

    def lookup(self, matrix: GroupedMatrix, ids: Tensor) -> Tensor:
        """Return rows of the weight by index: ids [n] int64 to [n, inputs] of its dtype."""
        return lookup_grouped(matrix, ids)

    def unpack(self, matrix: GroupedMatrix) -> Tensor:
        """Return the floats [outputs, inputs] of a matrix in the memory of the host."""
        parts = []
        for part in matrix.parts:
            assert isinstance(part, PackedPart), "the host has panels"
            parts.append(lookup_panels(part, torch.arange(part.outputs), matrix.dtype))
        return torch.cat(parts)

    def stack(self, num_experts: int, experts: Iterable[Iterable[Any]]) -> GroupedStack:
        """Stack the weights of all experts; see `WeightFormat.stack`."""
        return stack_words(num_experts, map(pack_for_gpu, experts))

    def select_expert(self, stack: GroupedStack, expert: int) -> GroupedMatrix:
        """Return the weight of one expert of a stack."""
        return GroupedMatrix((stack[expert],), torch.float32)


class Int4Format(GroupedFormat):
    """Floating-point weights that are rounded to 4 bits when a model is loaded."""

    head_format = "int8_groups"

    def prepare(self, parts: Sequence[Any], magnitudes: Tensor | None = None) -> GroupedMatrix:
        """Quantize weights [outputs, inputs] to 4 bits in groups of BLOCK_INPUTS."""
        return super().prepare([quantize_to_4_bits(part) for part in parts])

    def stack(self, num_experts: int, experts: Iterable[Iterable[Tensor]]) -> GroupedStack:
        """Quantize and stack the weights of all experts."""
        return super().stack(num_experts, (map(quantize_to_4_bits, parts) for parts in experts))


class Int8GroupsFormat(GroupedFormat):
    """Floating-point weights that are rounded to 8 bits in groups when a model is loaded."""

    def prepare(self, parts: Sequence[Any], magnitudes: Tensor | None = None) -> GroupedMatrix:
        """Quantize weights [outputs, inputs] to 8 bits in groups of BLOCK_INPUTS."""
        return super().prepare([quantize_to_8_bits(part) for part in parts])


def linear_grouped(
    x: Tensor, matrix: GroupedMatrix, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Apply a linear layer with a weight of few bits: return x W^T + b, [tokens, outputs].

    Args:
        x: [tokens, inputs].
        matrix: W [outputs, inputs].
        bias: b [outputs], of x's dtype.
        out: receives the result if given: contiguous, of x's dtype or float32.
    """
    if out is not None:
        result = out
    elif x.device.type == "cpu":
        library = library_for(x, "linear_grouped")
        shape = (len(x), matrix.outputs)
        result = x.new_empty(shape) if library is None else library.empty(shape, x.dtype)
    else:
        result = x.new_empty(len(x), matrix.outputs)
    begin = 0
    for part in matrix.parts:
        columns = slice(begin, begin + part.outputs)
        own_bias = None if bias is None else bias[columns]
        _multiply(x, part, own_bias, result[:, columns])
        begin += part.outputs
    return result


def _multiply(x: Tensor, part: PackedPart | GroupedWords, bias: Tensor | None, out: Tensor) -> None:
    """Write x W^T + b to out [tokens, outputs]."""
    if isinstance(part, PackedPart):
        multiply_panels(make_contiguous(x), part, bias, out)
    else:
        from gllm.kernels.triton import linear_grouped as on_gpu

        on_gpu.linear_grouped(x, part, bias, out)


def lookup_grouped(matrix: GroupedMatrix, ids: Tensor) -> Tensor:
    """Return rows of a packed weight by index: ids [n] int64 to [n, inputs] of its dtype.

    Raises:
        IndexError: an index is out of range, on a CPU.
    """
    (part,) = matrix.parts
    if isinstance(part, GroupedWords):
        return part.floats(ids).to(matrix.dtype)
    return lookup_panels(part, ids, matrix.dtype)
