"""Tensors of open safetensors files, and the views that split stacks of experts.

transformers 5 stacks experts: `experts.gate_up_proj` [experts, 2 * inner, hidden] and
`experts.down_proj` [experts, hidden, inner], with block scales `..._scale_inv` stacked alike. It
writes weights of each expert by default, but keeps the scales of weights that it has quantized
itself stacked; with `save_original_format=False` everything is. `split_experts` gives each expert
tensors of its own, by the names that its family has.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gllm.models import spec
from gllm.models.errors import ModelError
from gllm.models.shard import TensorShards

CPU = torch.device("cpu")
STACKS_BLOCK = "mlp"
"""Name of a layer's feed-forward block that has stacks, whatever the family calls the block."""
SUFFIXES = {"": "weight", "_scale_inv": "weight_scale_inv", "_activation_scale": "activation_scale"}
"""Ends of a stack's name, and of the names of the tensors in it."""
COMPARED_ROWS = 1024
"""Rows of two matrices that are compared at once."""
SIZES = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes of an element, by safetensors' name of its type; 1 for all others that are read."""


@dataclass(frozen=True)
class StoredTensor:
    """Reference to a tensor in an open safetensors file, or to one expert in a stacked tensor."""

    handle: Any
    name: str
    expert: int | None = None
    """Index in the first dimension; None for the whole tensor."""
    rows: range = range(1)
    """Range of the second dimension; only with `expert`, and not of vectors."""

    @property
    def dtype(self) -> str:
        """The type of the elements, by safetensors' name."""
        kind: str = self.handle.get_slice(self.name).get_dtype()
        return kind

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, from the file's header."""
        shape = tuple(self.handle.get_slice(self.name).get_shape())
        if self.expert is None:
            return shape
        return (len(self.rows), *shape[2:]) if len(shape) > 1 else ()

    @property
    def nbytes(self) -> int:
        """Bytes in the file, from its header."""
        size = SIZES.get(self.dtype, 1)
        for length in self.shape:
            size *= length
        return size

    def read(self, cuts: TensorShards = ()) -> Tensor:
        """Return the tensor, or the shards of its dimensions, on the CPU; it may be memory-mapped.

        Args:
            cuts: shard of each dimension; empty for the whole tensor.
        """
        with CPU:  # whatever the default is meanwhile
            if cuts:
                return self._read_runs(self.handle.get_slice(self.name), self.shape, cuts, ())
            if self.expert is None:
                whole: Tensor = self.handle.get_tensor(self.name)
                return whole
            stack = self.handle.get_slice(self.name)
            is_vector = len(stack.get_shape()) == 1
            rows = slice(self.rows.start, self.rows.stop)
            part: Tensor = stack[self.expert] if is_vector else stack[self.expert, rows]
            return part

    def _read_runs(
        self, file: Any, shape: tuple[int, ...], cuts: TensorShards, chosen: tuple[slice, ...]
    ) -> Tensor:
        """Return the runs of the dimensions after those of which a range is chosen."""
        dimension = len(chosen)
        if dimension == len(cuts):
            part: Tensor = file[self._locate(chosen)]
            return part
        cut = cuts[dimension]
        runs = ((0, shape[dimension]),) if cut is None else cut.runs
        parts = [
            self._read_runs(file, shape, cuts, (*chosen, slice(begin, end))) for begin, end in runs
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dimension)

    def _locate(self, chosen: tuple[slice, ...]) -> tuple[int | slice, ...]:
        """Return the place in the file of ranges of this tensor's dimensions."""
        if self.expert is None:
            return chosen
        first = slice(self.rows.start + chosen[0].start, self.rows.start + chosen[0].stop)
        return self.expert, first, *chosen[1:]

    def is_equal(self, other: "StoredTensor") -> bool:
        """Return True if two whole matrices have the same values, comparing some rows at a time."""
        if self.shape != other.shape or len(self.shape) != 2:
            return False
        begins = range(0, self.shape[0], COMPARED_ROWS)
        slabs = (slice(begin, begin + COMPARED_ROWS) for begin in begins)
        return all(torch.equal(self._read_rows(slab), other._read_rows(slab)) for slab in slabs)

    def _read_rows(self, rows: slice) -> Tensor:
        """Return rows of a whole tensor in float32."""
        with CPU:
            part: Tensor = self.handle.get_slice(self.name)[rows]
            return part.float()


def select(tensor: Tensor, outer: TensorShards, inner: TensorShards) -> Tensor:
    """Return the part of a tensor that belongs to a smaller shard.

    Args:
        tensor: elements of the shards `outer`.
        outer: shard of each dimension that the tensor has.
        inner: shard of each dimension to return, contained in `outer`.
    """
    for dimension, (whole, part) in enumerate(zip(outer, inner, strict=True)):
        if whole is not None and part is not None and whole != part:
            held, selected = (
                torch.cat([torch.arange(*run) for run in cut.runs]) for cut in (whole, part)
            )
            positions = torch.searchsorted(held, selected).to(tensor.device)
            tensor = tensor.index_select(dimension, positions)
    return tensor


StoredTensors = dict[str, StoredTensor]
"""Tensors by the names that a model reads them by."""


def split_experts(tensors: StoredTensors, model: spec.ModelSpec) -> None:
    """Replace stacked expert tensors in `tensors` by a reference for each expert.

    Raises ModelError if the shape of a stack does not match config.json.
    """
    for number, layer in enumerate(model.layers):
        if isinstance(layer.mlp, spec.ExpertsSpec):
            _split_layer(tensors, layer.mlp, model, model.layer_name_format.format(number))


def _split_layer(
    tensors: StoredTensors, experts: spec.ExpertsSpec, model: spec.ModelSpec, layer: str
) -> None:
    up, down = experts.expert.up_proj.names, experts.expert.down_proj.names
    # In the file are the inner sizes of all ranks.
    cut, hidden = experts.expert.down_proj.columns, model.hidden_size
    inner = experts.expert.intermediate_size if cut is None else cut.size
    folder = up[0].partition(".{}")[0]
    _rename_block(tensors, layer, folder.rpartition(".")[0])
    for stack, names, outputs, inputs in (
        ("gate_up_proj", up, inner, hidden),
        ("down_proj", down, hidden, inner),
    ):
        weights = (experts.num_experts, len(names) * outputs, inputs)
        shapes: dict[str, list[tuple[int, ...]]] = {
            "weight": [weights],
            "weight_scale_inv": _scale_shapes(weights, len(names), model.quantization),
            "activation_scale": [(experts.num_experts,)],
        }
        for suffix, end in SUFFIXES.items():
            name = f"{layer}.{folder}.{stack}{suffix}"
            targets = [
                [f"{layer}.{one.format(e)}.{end}" for one in names] for e in range(weights[0])
            ]
            # Where both forms exist, the stack stays and loading reports an error.
            if name in tensors and targets[0][0] not in tensors:
                _check_shape(name, tensors[name].shape, shapes[end])
                _split(tensors, tensors.pop(name), targets)


def _split(tensors: StoredTensors, stack: StoredTensor, targets: list[list[str]]) -> None:
    """Add the parts of a stack to `tensors`, by the names `targets` [experts][projections]."""
    count = len(targets[0])
    rows = stack.shape[1] if len(stack.shape) > 1 else 1
    size = max(1, rows // count)
    for expert, names in enumerate(targets):
        for i, name in enumerate(names):
            # A single row of scales holds for gate and up.
            first = min(i * size, rows - size)
            part = StoredTensor(stack.handle, stack.name, expert, range(first, first + size))
            tensors[name] = part


def _rename_block(tensors: StoredTensors, layer: str, block: str) -> None:
    """Give the tensors of a feed-forward block with stacks the family's name of the block."""
    begin = f"{layer}.{STACKS_BLOCK}."
    if block == STACKS_BLOCK or f"{begin}experts.gate_up_proj" not in tensors:
        return
    for name in [name for name in tensors if name.startswith(begin)]:
        tensors[f"{layer}.{block}.{name.removeprefix(begin)}"] = tensors.pop(name)


def _scale_shapes(
    weights: tuple[int, int, int], count: int, stored: spec.QuantizationSpec | None
) -> list[tuple[int, ...]]:
    """Return the permitted shapes of the scales of stacked weights of `count` projections.

    weights: shape of the stack, [experts, outputs of all projections, inputs].
    """
    experts, outputs, inputs = weights
    if stored is None or stored.block is None:
        return [(experts, 1, 1), (experts, count, 1), (experts, outputs, 1), (experts,)]
    rows, columns = stored.block
    # A block that holds outputs of both gate and up cannot be split.
    is_aligned = count == 1 or outputs // count % rows == 0
    return [(experts, -(-outputs // rows), -(-inputs // columns))] if is_aligned else []


def _check_shape(name: str, shape: tuple[int, ...], permitted: list[tuple[int, ...]]) -> None:
    """Raise ModelError if the shape of a stack is not permitted."""
    if not permitted:
        raise ModelError(f"tensor {name!r} has scales of blocks that hold both gate and up")
    if shape not in permitted:
        raise ModelError(
            f"tensor {name!r} has shape {shape}, but by config.json it has to be {permitted[0]}"
        )
