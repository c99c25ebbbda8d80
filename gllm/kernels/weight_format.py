"""Weight formats of linear layers: the interface that each format implements, and the registry.

A format is one file of this package and one line of WEIGHT_FORMATS. It lays out weights in memory
for its kernels and multiplies by them; gllm/models/formats/ reads those that checkpoints store.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch import Tensor

from gllm.kernels.activation import act_and_mul

UNQUANTIZED = "none"
"""The format of plain tensors."""
WEIGHT_FORMATS = MappingProxyType(
    {
        UNQUANTIZED: "gllm.kernels.linear_unquantized:UnquantizedFormat",
        "int8": "gllm.kernels.linear_int8:Int8Format",
        "fp8": "gllm.kernels.linear_fp8:Fp8Format",
        "grouped": "gllm.kernels.linear_grouped:GroupedFormat",
        "int4": "gllm.kernels.linear_grouped:Int4Format",
        "int8_groups": "gllm.kernels.linear_grouped:Int8GroupsFormat",
    }
)
"""Format names to "module:class", imported on first use. Names that `--quantization` offers are
keys of this table."""


class Matrix(Protocol):
    """Interface of a weight [outputs, inputs] that is ready for multiplication, in some format."""

    format: ClassVar[str]
    """A key of WEIGHT_FORMATS."""

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes."""


Weight = Tensor | Matrix
"""A weight [outputs, inputs] as loaded: a plain tensor, or a matrix in the checkpoint's format."""
M = TypeVar("M")


class WeightFormat(ABC, Generic[M]):
    """Operations of one weight format (unquantized, int8, fp8): prepare, multiply, look up.

    Instances have no state.
    """

    has_lookup: ClassVar[bool] = False
    """True if `lookup` is implemented: the matrix keeps the exact values of the weight."""
    head_format: ClassVar[str | None] = None
    """Format of the LM head, and of an embedding tied to it, if not this one: a key of
    WEIGHT_FORMATS."""
    scales_rows: ClassVar[bool] = False
    """True if products scale each row of x by its largest magnitude. Ranks that hold some inputs
    each have to agree on the magnitude of the whole row first."""

    def dequantize(self, matrix: M) -> Tensor:
        """Convert a loaded weight to floats [outputs, inputs]."""
        raise NotImplementedError(f"{type(self).__name__} has no format in checkpoints")

    @abstractmethod
    def prepare(self, parts: Sequence[Any], magnitudes: Tensor | None = None) -> M:
        """Concatenate parts [outputs, inputs] along the outputs into one matrix for `multiply`.

        Args:
            parts: matrices of this format, if a checkpoint stores it; tensors otherwise.
            magnitudes: [outputs] float32: largest magnitude of each output's whole row, if the
                parts lack some inputs and the format scales rows.

        Raises:
            ValueError: the parts cannot be represented in this format.
        """

    def prepare_gated(self, parts: Sequence[Any], activation: str) -> M:
        """Merge the gate and up projections of an MLP into one matrix for `multiply_gated`.

        Args:
            parts: weights of the gate and the up projection, in this order.
            activation: a name of `gllm.kernels.activation`.
        """
        return self.prepare(parts)

    @abstractmethod
    def multiply(
        self,
        x: Tensor,
        matrix: M,
        bias: Tensor | None,
        out: Tensor | None,
        magnitudes: Tensor | None = None,
    ) -> Tensor:
        """Apply a linear layer: return x W^T + b, [tokens, outputs].

        Args:
            x: [tokens, inputs].
            matrix: W [outputs, inputs].
            bias: b [outputs].
            out: receives the result if given: contiguous, of x's dtype or float32.
            magnitudes: [tokens] float32: as from `row_magnitudes`, but of the whole rows, if x and
                W lack some inputs and the format scales rows.
        """

    def row_magnitudes(self, x: Tensor) -> Tensor:
        """Return the largest absolute value of each row of x, [tokens] float32.

        It is +inf for a row with a number that is not finite.
        """
        raise NotImplementedError(f"{type(self).__name__} does not scale rows")

    def multiply_gated(self, x: Tensor, matrix: M, bias: Tensor | None, activation: str) -> Tensor:
        """Return act(gate(x)) * up(x), [tokens, outputs].

        Args:
            x: [tokens, inputs].
            matrix: G and U, from `prepare_gated` with the same activation.
            bias: b and c, [2 * outputs].
            activation: a name of `gllm.kernels.activation`.
        """
        return act_and_mul(activation, self.multiply(x, matrix, bias, None))

    def lookup(self, matrix: M, ids: Tensor) -> Tensor:
        """Return rows of the weight by index: ids [n] int64 to [n, inputs]."""
        raise NotImplementedError(f"{type(self).__name__} does not keep exact values")

    def unpack(self, matrix: M) -> Tensor:
        """Return the floats [outputs, inputs] of a matrix, also of one for `multiply_gated`.

        Only of a matrix in the memory of the host, in a format with `has_lookup`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not keep exact values")

    def stack(self, num_experts: int, experts: Iterable[Sequence[Any]]) -> Any:
        """Stack the weights of all experts into one object, as GPU kernels read them.

        Args:
            num_experts: number of items of `experts`.
            experts: parts [outputs, inputs] of each expert, to be stacked along the outputs.

        Raises:
            ValueError: experts have weights of different shapes, dtypes or blocks.
        """
        raise NotImplementedError(f"{type(self).__name__} has no kernels for stacked experts")

    def select_expert(self, stack: Any, expert: int) -> M:
        """Return the matrix of one expert of a `stack`."""
        raise NotImplementedError(f"{type(self).__name__} has no kernels for stacked experts")


@cache
def weight_format(name: str) -> WeightFormat[Any]:
    """Return the weight format with this name, a key of WEIGHT_FORMATS such as "int8"."""
    module, class_name = WEIGHT_FORMATS[name].split(":")
    instance: WeightFormat[Any] = getattr(importlib.import_module(module), class_name)()
    return instance


def format_of(weight: Weight) -> WeightFormat[Any]:
    """Return the weight format of a loaded weight: a tensor, a matrix or a stack of experts."""
    return weight_format(UNQUANTIZED if isinstance(weight, Tensor) else weight.format)


def dequantize_weight(weight: Weight) -> Tensor:
    """Convert a loaded weight to floats [outputs, inputs]; a plain tensor is returned unchanged."""
    return format_of(weight).dequantize(weight)


def select_format(
    parts: Sequence[Weight], quantization: str
) -> tuple[WeightFormat[Any], Sequence[Weight]]:
    """Choose the format to prepare loaded weights in, and dequantize them if their format differs.

    Weights stay in the checkpoint's format if all parts have the same one and `quantization` is
    "none". All others are dequantized first.

    Returns:
        The format, and the parts as its `prepare` expects them.
    """
    stored = {format_of(part) for part in parts}
    if quantization == UNQUANTIZED and len(stored) == 1:
        return stored.pop(), parts
    return weight_format(quantization), [dequantize_weight(part) for part in parts]


def stack_tensors(num_experts: int, tensors: Iterable[Tensor]) -> Tensor:
    """Stack tensors of the same shape and dtype along a new first dimension.

    The result is [num_experts, *shape]. Tensors are read one at a time, so that besides the result
    only one is in memory.

    Raises:
        ValueError: the shapes differ.
    """
    stack: Tensor | None = None
    for index, tensor in enumerate(tensors):
        if stack is None:
            stack = tensor.new_empty(num_experts, *tensor.shape)
        if tensor.shape != stack.shape[1:]:
            raise ValueError("experts of one layer have weights of different shapes")
        stack[index] = tensor
    assert stack is not None, "there is at least one expert"
    return stack
