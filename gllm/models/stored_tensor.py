"""Tensors of open safetensors files, and the views that split stacks of experts.

transformers 5 stacks experts: `experts.gate_up_proj` [experts, 2 * inner, hidden] and
`experts.down_proj` [experts, hidden, inner], with block scales `..._scale_inv` stacked alike. It
writes weights of each expert by default, but keeps the scales of weights that it has quantized
itself stacked; with `save_original_format=False` everything is. `split_experts` gives each expert
tensors of its own, by the names that its family has.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gllm.models.errors import ModelError
from gllm.models.shard import TensorShards
from gllm.models.spec.feed_forward import ExpertsSpec
from gllm.models.spec.model import ModelSpec, QuantizationSpec

CPU = torch.device("cpu")
STACKS_BLOCK = "mlp"
"""Name of a layer's feed-forward block that has stacks, whatever the family calls the block."""
SUFFIXES = {"": "weight", "_scale_inv": "weight_scale_inv", "_activation_scale": "activation_scale"}
"""Ends of a stack's name, and of the names of the tensors in it."""
COMPARED_ROWS = 1024
"""Rows of two matrices that are compared at once."""
MXFP4_BLOCK = 32
"""Inputs that share a scale in MXFP4, whose codes have 4 bits."""
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
    """Range of an expert's outputs; only with `expert`, and not of vectors."""
    is_transposed: bool = False
    """True if the stack is [experts, inputs, outputs] instead of [experts, outputs, inputs]."""

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
        if self.is_transposed:
            return len(self.rows), shape[1]
        # Blocks of codes [experts, outputs, blocks, bytes] are rows of bytes.
        inputs = (math.prod(shape[2:]),) if len(shape) > 2 else ()
        return (len(self.rows), *inputs) if len(shape) > 1 else ()

    @property
    def nbytes(self) -> int:
        """Bytes in the file, from its header."""
        size = SIZES.get(self.dtype, 1)
        for length in self.shape:
            size *= length
        return size

    def read(self, shards: TensorShards = ()) -> Tensor:
        """Return the tensor, or the shards of its dimensions, on the CPU; it may be memory-mapped.

        Args:
            shards: shard of each dimension; empty for the whole tensor.
        """
        with CPU:  # whatever the default is meanwhile
            if shards:
                return self._read_runs(self.handle.get_slice(self.name), self.shape, shards, ())
            if self.expert is None:
                whole: Tensor = self.handle.get_tensor(self.name)
                return whole
            stack = self.handle.get_slice(self.name)
            return self._read_block(stack, tuple(slice(0, size) for size in self.shape))

    def _read_runs(
        self, file: Any, shape: tuple[int, ...], shards: TensorShards, chosen: tuple[slice, ...]
    ) -> Tensor:
        """Return the runs of the dimensions after those of which a range is chosen."""
        dimension = len(chosen)
        if dimension == len(shards):
            return self._read_block(file, chosen)
        shard = shards[dimension]
        runs = ((0, shape[dimension]),) if shard is None else shard.runs
        parts = [
            self._read_runs(file, shape, shards, (*chosen, slice(begin, end)))
            for begin, end in runs
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dimension)

    def _read_block(self, file: Any, chosen: tuple[slice, ...]) -> Tensor:
        """Return ranges of this tensor's dimensions."""
        part: Tensor
        if self.expert is None or not chosen:
            part = file[chosen or self.expert]
            return part
        rows = self.rows[chosen[0]]
        span, columns = slice(rows[0], rows[-1] + 1), chosen[1:]
        if self.is_transposed:
            part = file[self.expert, columns[0], span]
            return part[:, :: rows.step].t()
        if len(file.get_shape()) > 3:
            part = file[self.expert, span]
            return part[:: rows.step].flatten(1)[:, columns[0]]
        part = file[self.expert, span, *columns]
        return part[:: rows.step]

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
                torch.cat([torch.arange(*run) for run in shard.runs]) for shard in (whole, part)
            )
            positions = torch.searchsorted(held, selected).to(tensor.device)
            tensor = tensor.index_select(dimension, positions)
    return tensor


StoredTensors = dict[str, StoredTensor]
"""Tensors by the names that a model reads them by."""


def split_experts(tensors: StoredTensors, model: ModelSpec) -> None:
    """Replace stacked expert tensors in `tensors` by a reference for each expert.

    Raises ModelError if the shape of a stack does not match config.json.
    """
    for number, layer in enumerate(model.layers):
        for block in (layer.mlp, layer.experts and layer.experts.experts):
            if isinstance(block, ExpertsSpec):
                _split_layer(tensors, block, model, model.layer_name_format.format(number))


def _split_layer(
    tensors: StoredTensors, experts: ExpertsSpec, model: ModelSpec, layer: str
) -> None:
    up, down = experts.expert.up_proj.names, experts.expert.down_proj.names
    # In the file are the inner sizes of all ranks.
    shard, hidden = experts.expert.down_proj.columns, model.hidden_size
    inner = experts.expert.intermediate_size if shard is None else shard.size
    folder = up[0].partition(".{}")[0]
    _rename_block(tensors, layer, folder.rpartition(".")[0])
    stacks = ("gate_up_proj", up, inner, hidden), ("down_proj", down, hidden, inner)
    # Qwen3-VL's files have [experts, inputs, outputs]; one of the two matrices is not square.
    is_transposed = any(
        f"{layer}.{folder}.{stack}" in tensors
        and tensors[f"{layer}.{folder}.{stack}"].shape
        == (experts.num_experts, inputs, len(names) * outputs)
        != (experts.num_experts, len(names) * outputs, inputs)
        for stack, names, outputs, inputs in stacks
    )
    for stack, names, outputs, inputs in stacks:
        if experts.stacks is not None:
            own = experts.stacks.up_proj if names == up else experts.stacks.down_proj
            _split_own_stack(tensors, experts, f"{layer}.{own}", layer, names, (outputs, inputs))
            continue
        weights = (experts.num_experts, len(names) * outputs, inputs)
        shapes: dict[str, list[tuple[int, ...]]] = {
            "weight": [weights],
            "weight_scale_inv": _scale_shapes(weights, len(names), model.quantization),
            "activation_scale": [(experts.num_experts,)],
        }
        for suffix, end in SUFFIXES.items():
            name = f"{layer}.{folder}.{stack}{suffix}"
            targets = _expert_names(layer, names, end, experts.num_experts)
            # Where both forms exist, the stack stays and loading reports an error.
            if name in tensors and targets[0][0] not in tensors:
                permitted = shapes[end]
                if is_transposed:
                    permitted = [(shape[0], *reversed(shape[1:])) for shape in permitted]
                _check_shape(name, tensors[name].shape, permitted)
                _split(tensors, tensors.pop(name), targets, is_transposed)


def _expert_names(layer: str, names: tuple[str, ...], end: str, count: int) -> list[list[str]]:
    """Return the names of the experts' tensors, [experts][projections]."""
    return [[f"{layer}.{name.format(index)}.{end}" for name in names] for index in range(count)]


def _split_own_stack(
    tensors: StoredTensors,
    experts: ExpertsSpec,
    stack: str,
    layer: str,
    names: tuple[str, ...],
    shape: tuple[int, int],
) -> None:
    """Replace the stacks that a family itself stores the projections `names` in.

    Args:
        tensors: tensors of the checkpoint.
        experts: the layer's experts, which have `stacks`.
        stack: beginning of the stacks' names.
        layer: prefix of the layer's tensors.
        names: names of the projections.
        shape: outputs and inputs of each projection.
    """
    assert experts.stacks is not None, "the family names its stacks"
    is_transposed, is_interleaved = experts.stacks.is_transposed, experts.stacks.is_interleaved
    outputs, inputs = len(names) * shape[0], shape[1]
    blocks = -(-inputs // MXFP4_BLOCK)
    for suffix, end, stored in (
        ("", "weight", (inputs, outputs) if is_transposed else (outputs, inputs)),
        ("_bias", "bias", (outputs,)),
        ("_blocks", "weight_packed", (outputs, blocks, MXFP4_BLOCK // 2)),
        ("_scales", "weight_scale", (outputs, blocks)),
    ):
        name = stack + suffix
        if name in tensors:
            _check_shape(name, tensors[name].shape, [(experts.num_experts, *stored)])
            targets = _expert_names(layer, names, end, experts.num_experts)
            is_matrix_transposed = is_transposed and not suffix
            _split(tensors, tensors.pop(name), targets, is_matrix_transposed, is_interleaved)


def _split(
    tensors: StoredTensors,
    stack: StoredTensor,
    targets: list[list[str]],
    is_transposed: bool = False,
    is_interleaved: bool = False,
) -> None:
    """Add the parts of a stack to `tensors`, by the names `targets` [experts][projections]."""
    count, is_matrix = len(targets[0]), len(stack.shape) > 1
    is_transposed = is_transposed and is_matrix
    rows = stack.shape[-1 if is_transposed else 1] if is_matrix else 1
    size = max(1, rows // count)
    for expert, names in enumerate(targets):
        for i, name in enumerate(names):
            # A single row of scales holds for gate and up.
            first = min(i * size, rows - size)
            part = range(i, rows, count) if is_interleaved else range(first, first + size)
            tensors[name] = StoredTensor(stack.handle, stack.name, expert, part, is_transposed)


def _rename_block(tensors: StoredTensors, layer: str, block: str) -> None:
    """Give the tensors of a feed-forward block with stacks the family's name of the block."""
    begin = f"{layer}.{STACKS_BLOCK}."
    if block == STACKS_BLOCK or f"{begin}experts.gate_up_proj" not in tensors:
        return
    for name in [name for name in tensors if name.startswith(begin)]:
        tensors[f"{layer}.{block}.{name.removeprefix(begin)}"] = tensors.pop(name)


def _scale_shapes(
    weights: tuple[int, int, int], count: int, stored: QuantizationSpec | None
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
