"""Loader of one stage's weights from a Hugging Face folder, or from GGUF files.

Tensors are read from memory-mapped safetensors, only those that the stage requests, and of a
tensor parallel rank only its runs of them; those of GGUF files are read some rows at a time. Every
tensor of the stage has to be requested: one that is left over may change the results.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gllm.kernels.grouped_weight import GroupedWeight
from gllm.kernels.linear_grouped import DEVICES
from gllm.kernels.weight_format import Weight, dequantize_weight
from gllm.models.errors import ModelError
from gllm.models.formats.gguf_file import open_gguf_files
from gllm.models.formats.gguf_names import GgufModel
from gllm.models.formats.gguf_tensors import GgufStoredTensor
from gllm.models.formats.stored_format import StoredLinear, stored_format
from gllm.models.multimodal import rename_tensor
from gllm.models.ranks import Ranks
from gllm.models.shard import TensorShards, head_shard
from gllm.models.spec.attention import AttentionSpec, LatentAttentionSpec
from gllm.models.spec.feed_forward import ExpertsSpec, MLPSpec
from gllm.models.spec.layer import LayerSpec, NoMixerSpec, SingleMixerSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import DimensionShard, LinearSpec, NormSpec
from gllm.models.spec.recurrent import RecurrentSpec
from gllm.models.stored_tensor import CPU, StoredTensor, StoredTensors, split_experts
from gllm.models.weight_files import find_weight_files, unreadable_reason


def tensor_shards(model: ModelSpec, layers: range) -> dict[str, TensorShards]:
    """Return this rank's part of each tensor that tensor parallel ranks divide, by tensor name.

    Scales of quantized weights are not included; see gllm.models.shard.shard_scales.

    Args:
        model: the shard of one rank, from `shard`; a whole model has no divided tensors.
        layers: indices of the stage's layers.
    """
    shards: dict[str, TensorShards] = {}
    if (per_layer := model.per_layer_embedding) is not None:
        size = per_layer.size
        run = (layers.start * size, layers.stop * size)
        own = DimensionShard(model.num_layers * size, (run,))
        shards[f"{per_layer.name}.weight"] = None, own
        shards[f"{per_layer.projection}.weight"] = own, None
    if model.ranks == 1:
        return shards
    embedding, head = model.embedding, model.head
    for name, rows in ((embedding.name, embedding.rows), (head.name, head.rows)):
        shards[f"{name}.weight"] = rows, None
        shards[f"{name}.bias"] = (rows,)
    for index in layers:
        layer, prefix = model.layers[index], model.layer_name_format.format(index)
        for linear in _linears(layer):
            shards |= {f"{prefix}.{name}": shard for name, shard in _linear_shards(linear)}
        for mixer in layer.mixers:
            if isinstance(mixer, AttentionSpec) and mixer.sinks is not None:
                shards[f"{prefix}.{mixer.sinks}"] = (head_shard(mixer),)
            shards |= {f"{prefix}.{name}": shard for name, shard in _channel_shards(mixer)}
        for norm in _head_norms(layer):
            shards |= {f"{prefix}.{norm.name}.{kind}": (norm.heads,) for kind in ("weight", "bias")}
    return {name: shard for name, shard in shards.items() if any(shard)}


def _linears(layer: LayerSpec) -> Iterator[LinearSpec]:
    """Yield the linear layers of a layer that may be divided, of each expert its own."""
    for mixer in layer.mixers:
        if isinstance(mixer, AttentionSpec):
            yield mixer.qkv_proj
            if mixer.gate_proj is not None:
                yield mixer.gate_proj
        elif isinstance(mixer, RecurrentSpec):
            yield from mixer.in_linears
        elif isinstance(mixer, LatentAttentionSpec):
            yield from (mixer.q_proj, mixer.kv_up_proj)
            if mixer.gate_proj is not None:
                yield mixer.gate_proj
        if not isinstance(mixer, NoMixerSpec):
            yield mixer.out_proj
    for mlp in (layer.mlp, *([layer.experts.experts] if layer.experts else [])):
        if isinstance(mlp, MLPSpec):
            yield from (mlp.up_proj, mlp.down_proj)
        if not isinstance(mlp, ExpertsSpec):
            continue
        for linear in (mlp.expert.up_proj, mlp.expert.down_proj):
            for index in range(mlp.num_experts):
                yield replace(linear, names=tuple(name.format(index) for name in linear.names))
        if mlp.shared_expert is not None:
            yield from (mlp.shared_expert.up_proj, mlp.shared_expert.down_proj)


def _head_norms(layer: LayerSpec) -> Iterator[NormSpec]:
    """Yield the norms with a scale for each head."""
    for mixer in layer.mixers:
        if isinstance(mixer, AttentionSpec):
            norms = mixer.query_norm, mixer.key_norm
            yield from (norm for norm in norms if norm is not None)


def _channel_shards(spec: SingleMixerSpec) -> Iterator[tuple[str, TensorShards]]:
    """Yield the tensors of a recurrent block with one row per head or channel, and their shards."""
    if isinstance(spec, RecurrentSpec):
        for vector in spec.vectors:
            yield vector.name, (*[None] * vector.dimension, vector.rows)


def _linear_shards(linear: LinearSpec) -> Iterator[tuple[str, TensorShards]]:
    """Yield the tensors of a linear layer and their shards."""
    shards: Sequence[DimensionShard | None] = linear.rows or [None] * len(linear.names)
    for name, rows in zip(linear.names, shards, strict=True):
        yield f"{name}.bias", (rows,)
        is_transposed = linear.is_transposed
        yield (
            f"{name}.weight",
            (linear.columns, rows) if is_transposed else (rows, linear.columns),
        )


def is_same_tensor(
    one: StoredTensor | GgufStoredTensor, other: StoredTensor | GgufStoredTensor
) -> bool:
    """Return True if two whole matrices of one checkpoint have the same values."""
    if isinstance(one, GgufStoredTensor):
        return isinstance(other, GgufStoredTensor) and one.is_equal(other)
    return isinstance(other, StoredTensor) and one.is_equal(other)


LEFTOVERS = (r"(.*\.)?rotary(_pos)?_emb\.inv_freq",)
"""Patterns of tensors that old files of all families may have and that are computed here. A family
names its own in Model.ignored; docs/models.md lists them all."""


class TensorNames:
    """Classifies the tensor names of a checkpoint: read by a stage, ignored or unknown."""

    def __init__(self, model: ModelSpec) -> None:
        """Compile the patterns of a model."""
        self._model = model
        self._layer = re.compile(
            re.escape(model.layer_name_format).replace(r"\{\}", r"(\d+)") + r"\."
        )
        self._ignored = re.compile("|".join((*LEFTOVERS, *model.ignored_tensors)))

    def is_read(
        self,
        name: str,
        layers: range,
        held_layers: Collection[int] = (),
        holds_ends: bool = False,
    ) -> bool:
        """Return True if a stage with these layers reads a tensor.

        Args:
            name: name of the tensor.
            layers: layers of the stage.
            held_layers: layers that are in memory already, whose tensors are not read.
            holds_ends: True if embedding and LM head are in memory already.
        """
        if self.is_ignored(name) or not self._belongs(name, layers):
            return False
        index = self._layer_of(name)
        return not holds_ends if index is None else index not in held_layers

    def _belongs(self, name: str, layers: range) -> bool:
        index = self._layer_of(name)
        if index is not None:
            return index in layers
        return name.rpartition(".")[0] in self._model.names_outside_layers(layers)

    def is_ignored(self, name: str) -> bool:
        """Return True if a tensor is known as unused or is of a multi-token prediction layer."""
        index, last = self._layer_of(name), self._model.num_layers
        if index is not None and last <= index < last + self._model.num_prediction_layers:
            return True
        return self._ignored.fullmatch(name) is not None

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Return the names that no stage reads and that are not ignored, sorted."""
        every = range(self._model.num_layers)
        return sorted(
            name for name in names if not (self._belongs(name, every) or self.is_ignored(name))
        )

    def excess_layers(self, names: Iterable[str]) -> list[int]:
        """Return the sorted indices of layers in tensor names beyond the model's last layer."""
        numbers = {number for name in names if (number := self._layer_of(name)) is not None}
        return sorted(number for number in numbers if number >= self._model.num_layers)

    def _layer_of(self, name: str) -> int | None:
        found = self._layer.match(name)
        return None if found is None else int(found[1])


log = logging.getLogger(__name__)

HomeTensors = dict[str, StoredTensor | GgufStoredTensor]
"""Tensors of a checkpoint, by the names that the model reads them by."""
WEIGHT = ".weight"
"""End of the names that models read weights by, also those that a checkpoint has in several."""
Progress = Callable[[int, int], None]
"""Called with the bytes read and the total."""


class Checkpoint:
    """Reader of the checkpoint tensors that one stage needs; a context manager."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        model: ModelSpec,
        layers: range,
        device: torch.device = CPU,
        keep_quantized: bool | None = None,
        held_layers: Collection[int] = (),
        holds_ends: bool = False,
    ) -> None:
        """Open the files.

        Args:
            folder: Hugging Face model folder.
            dtype: dtype of the tensors returned.
            model: the whole model, or the part of one tensor parallel rank, which alone is read.
            layers: layers of the stage.
            device: device of the tensors returned.
            keep_quantized: True if `read_matrices` keeps the checkpoint's format; None for True on
                devices whose kernels multiply by it.
            held_layers: layers of the stage that are in memory already, and not read.
            holds_ends: True if embedding and LM head are in memory already, and not read.

        Raises:
            ModelError: the files are missing or invalid.
        """
        self.folder = folder
        self.dtype = dtype
        self.device = device
        """Device of the tensors returned."""
        self._stored = model.quantization
        self._format = (
            None if model.quantization is None else stored_format(model.quantization.format)
        )
        has_kernels = self._format is not None and device.type in self._format.devices
        if self._format is not None and not has_kernels and device.type != "cpu":
            log.warning(
                "no kernels of this device multiply by weights of %s: they become %s at load",
                *(self._format.codes, dtype),
            )
        self._keep_quantized = has_kernels if keep_quantized is None else keep_quantized
        self.weight_bytes = 0
        """Bytes in memory of the tensors read so far, on the device that computes."""
        self.read_bytes = 0
        """Bytes of the elements that were read from the files."""
        self._progress: Progress = lambda done, total: None
        self._done = 0
        self._files = ExitStack()
        self._may_lack_head = model.multimodal_class is not None
        homes = self._open(model)
        self.model = self._with_head(model, homes, layers)
        """The model, with an untied head if the checkpoint's differs from the embedding."""
        self._names = TensorNames(self.model)
        self._check_names(homes)
        self._homes = {
            name: home
            for name, home in homes.items()
            if self._names.is_read(name, layers, held_layers, holds_ends)
        }
        self._unread = set(self._homes)
        self._shards = tensor_shards(self.model, layers)
        self.total_bytes = sum(map(self._expected_bytes, self._homes))
        """Stored bytes of the tensors that are to be read."""

    def __enter__(self) -> Self:
        """Return the checkpoint."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the files."""
        self._files.close()

    @contextmanager
    def reading_to_host(self) -> Iterator[None]:
        """Return tensors in the memory of the host within the context, as CPU kernels read them.

        Tensors that are created in the context are there too; `weight_bytes` counts none of them.
        """
        before = self.device, self._keep_quantized, self.weight_bytes
        self.device = CPU
        self._keep_quantized = self._format is not None and CPU.type in self._format.devices
        try:
            with CPU:
                yield
        finally:
            self.device, self._keep_quantized, self.weight_bytes = before

    @property
    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape in the files of each tensor that the stage reads, by name."""
        return {name: tuple(home.shape) for name, home in self._homes.items()}

    def report_to(self, progress: Progress) -> None:
        """Call `progress` with bytes read and bytes in total, now and after each tensor."""
        self._progress = progress
        progress(self._done, self.total_bytes)

    def read(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return tensors of these names and shapes, concatenated along the first dimension."""
        return torch.cat(self.read_parts(names, shapes, dtype))

    def read_parts(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        """Return tensors of these names and shapes; callers copy them: they may be file memory."""
        parts = [dequantize_weight(part) for part in self._read_all(names, shapes, dtype)]
        self.weight_bytes += sum(part.nbytes for part in parts)
        return parts

    def read_matrices(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> Sequence[Weight]:
        """Return weights, quantized as in the checkpoint if all are and the kernels support it."""
        pairs = list(zip(names, shapes, strict=True))
        if self.device.type in DEVICES and all(self._is_grouped(name) for name in names):
            weights = [part for pair in pairs for part in self._read_grouped(*pair)]
        elif self._keep_quantized and all(self._is_quantized(name) for name in names):
            weights = self._read_all(names, shapes, None)
        else:
            return self.read_parts(names, shapes)
        self.weight_bytes += sum(weight.nbytes for weight in weights)
        return weights

    def read_whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a whole tensor, although this rank needs only a part; the caller frees it.

        Args:
            name: name of the tensor.
            shape: shape of the whole tensor.
        """
        return dequantize_weight(self._tensor(name, shape, self.dtype, ()))

    def check_all_read(self) -> None:
        """Raise ModelError if a tensor of the stage was not read."""
        unread = [name for name in sorted(self._unread) if not self._is_zero_bias(name)]
        self._refuse(unread)

    def _is_zero_bias(self, name: str) -> bool:
        """Return whether a tensor is a bias of zeros, which AutoGPTQ gives quantized layers."""
        stem, _, kind = name.rpartition(".")
        if kind != "bias" or not self._is_quantized(stem + WEIGHT):
            return False
        return not bool(self._read_stored(name, ()).any())

    def _check_names(self, names: Iterable[str]) -> None:
        """Raise ModelError for tensors that no stage reads."""
        unknown = self._names.unknown(names)
        layers = self._names.excess_layers(unknown)
        reason = ""
        if layers:
            count = self.model.num_layers
            reason = f"; config.json has {count} layers, the files have one of number {layers[-1]}"
        self._refuse(unknown, reason)

    def _refuse(self, names: Sequence[str], reason: str = "") -> None:
        """Raise ModelError for these tensors, if there are any."""
        if names:
            raise ModelError(
                f"{self.folder} has tensors that its architecture has no use for, so it would be "
                f"computed wrongly: {', '.join(names[:5])} ({len(names)} in all){reason}"
            )

    def _with_head(self, model: ModelSpec, homes: HomeTensors, layers: range) -> ModelSpec:
        """Return the model with the LM head of the files; drop the copy of a tied one.

        transformers does not tie weights that differ, whatever config.json says.
        """
        embedding = f"{model.embedding.name}.weight"
        own = f"{model.head.untied_name}.weight"
        head = f"{model.head.name}.weight"
        if head not in homes and not model.is_head_tied and self._may_lack_head:
            if layers.stop == model.num_layers:
                log.warning("the model has no %s: its embedding is used in its place", head)
            return replace(model, head=replace(model.head, name=model.embedding.name))
        if own not in homes or not model.is_head_tied:
            return model
        if embedding not in homes:
            homes[embedding] = homes[own]
        self.read_bytes += homes[own].nbytes + homes[embedding].nbytes
        if is_same_tensor(homes[own], homes[embedding]):
            del homes[own]
            return model
        if layers.stop == model.num_layers:
            message = "%s differs from the embedding, which config.json ties it to: it is used"
            log.warning(message, own)
        return replace(model, head=replace(model.head, name=own.removesuffix(".weight")))

    def _read_all(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype | None,
    ) -> list[Weight]:
        pairs = zip(names, shapes, strict=True)
        return [
            self._tensor(name, shape, dtype or self.dtype, self._shards.get(name, ()))
            for name, shape in pairs
        ]

    def _is_grouped(self, name: str) -> bool:
        """Return whether a tensor is stored in few bits, as kernels multiply by it."""
        home = self._homes.get(name)
        return isinstance(home, GgufStoredTensor) and home.is_grouped

    def _read_grouped(self, name: str, shape: tuple[int, ...]) -> Sequence[Weight]:
        """Return this rank's shard of a tensor stored in few bits, as weights along its outputs."""
        shards = self._shards.get(name, ())
        self._check_shape(name, self._whole_shape(name, shape, shards))
        home = self._homes[name]
        assert isinstance(home, GgufStoredTensor), "the tensor is packed"
        packed = home.read_grouped(shards, self.dtype)
        weights = [replace(weight, device=self.device) for weight in packed]
        self._mark_read(name, sum(weight.nbytes for weight in weights))
        return weights

    def _is_quantized(self, name: str) -> bool:
        """Return whether a tensor is stored in the format of quantization_config."""
        if self._format is None or not name.endswith(WEIGHT):
            return False
        home = self._homes.get(self._codes_name(name))
        return home is not None and home.dtype in self._format.dtypes

    def _codes_name(self, name: str) -> str:
        """Return the name of the tensor with the codes of a quantized weight."""
        assert self._format is not None, "the model has quantized weights"
        return name.removesuffix(WEIGHT) + "." + self._format.codes

    def _tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, shards: TensorShards
    ) -> Weight:
        """Return a tensor, or this rank's shard of it, of this shape."""
        whole = self._whole_shape(name, shape, shards)
        if self._is_quantized(name):
            return self._load_quantized(name, whole, shards, dtype)
        self._check_shape(name, whole)
        tensor = self._read_stored(name, shards)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelError(
                f"{self.folder}: tensor {name!r} is of type {tensor.dtype}; quantized tensors are "
                "read where config.json has their quantization_config: 8-bit floats only in "
                "float8_e4m3fn"
            )
        return tensor.to(self.device, dtype)

    def _whole_shape(self, name: str, shape: tuple[int, ...], shards: TensorShards) -> list[int]:
        """Return the shape of a tensor whose shard has the given shape."""
        whole = list(shape)
        for dimension, shard in enumerate(shards):
            if shard is not None:
                assert shape[dimension] == shard.num_elements, f"{name} has the shape of its shard"
                whole[dimension] = shard.size
        return whole

    def _check_shape(self, name: str, expected: Sequence[int]) -> None:
        """Raise ModelError if the stored tensor does not have this shape."""
        stored = self._home(name).shape
        if stored != tuple(expected):
            raise ModelError(
                f"{self.folder}: tensor {name!r} has shape {stored}, but by config.json it has to "
                f"be {tuple(expected)}"
            )

    def _load_quantized(
        self, name: str, whole: Sequence[int], shards: TensorShards, dtype: torch.dtype
    ) -> Weight:
        """Return a weight that is quantized in the checkpoint.

        It stays in the checkpoint's format unless a shard ends within a block of scales, or no
        kernels of the device multiply by it.

        Raises:
            ModelError: tensors are missing or do not fit.
        """
        assert self._format is not None, "the model has quantized weights"
        assert self._stored is not None, "the model has quantized weights"
        stem = name.removesuffix("weight")
        has_kernels = self.device.type in self._format.devices
        device = self.device if has_kernels and not self._format.is_read_on_cpu else CPU

        def shape_of(last_part: str) -> tuple[int, ...] | None:
            home = self._homes.get(stem + last_part)
            return None if home is None else home.shape

        def read(last_part: str, sibling_shards: TensorShards) -> Tensor:
            return self._read_stored(stem + last_part, sibling_shards).to(device)

        rows, columns = shards or (None, None)
        shape = whole[0], whole[1]
        layer = StoredLinear(self._stored, shape, rows, columns, dtype, shape_of, read)
        try:
            weight = self._format.load(layer)
        except ValueError as error:
            codes = self._codes_name(name)
            raise ModelError(f"{self.folder}: tensor {codes!r} {error}") from error
        if not has_kernels and self.device != CPU:
            return dequantize_weight(weight).to(self.device)
        return replace(weight, device=self.device) if isinstance(weight, GroupedWeight) else weight

    def _read_stored(self, name: str, shards: TensorShards) -> Tensor:
        """Return a tensor or its shard as it is stored, and mark it as read."""
        tensor = self._home(name).read(shards)
        self._mark_read(name, tensor.nbytes)
        return tensor

    def _mark_read(self, name: str, nbytes: int) -> None:
        """Count a tensor as read."""
        self.read_bytes += nbytes
        if name in self._unread:
            self._unread.remove(name)
            self._done += self._expected_bytes(name)
            self._progress(self._done, self.total_bytes)

    def _home(self, name: str) -> StoredTensor | GgufStoredTensor:
        """Return where a tensor is. Raises ModelError if it is missing."""
        if name not in self._homes:
            raise ModelError(f"{self.folder} lacks the tensor {name!r}")
        return self._homes[name]

    def _expected_bytes(self, name: str) -> int:
        """Return the stored bytes of a tensor's shards, for the progress."""
        size = self._homes[name].nbytes
        for shard in self._shards.get(name, ()):
            size = size if shard is None else size * shard.num_elements // shard.size
        return size

    def _open(self, model: ModelSpec) -> HomeTensors:
        """Open the files of the folder; return their tensors by their full names."""
        paths = find_weight_files(self.folder)
        if paths[0].suffix == ".gguf":
            files = open_gguf_files(paths)
            readers = [self._files.enter_context(file.open()) for file in files]
            return dict(GgufModel(list(zip(files, readers, strict=True)), model).tensors)
        homes = self._open_safetensors(paths, model)
        split_experts(homes, model)
        return dict(homes)

    def _open_safetensors(self, paths: Iterable[Path], model: ModelSpec) -> StoredTensors:
        """Open safetensors files; return their tensors by their full names."""
        homes: StoredTensors = {}
        for path in paths:
            try:
                handle = self._files.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ModelError(unreadable_reason(path, error)) from error
            stored = {name: StoredTensor(handle, name) for name in handle.keys()}  # noqa: SIM118
            if repeated := homes.keys() & stored.keys():
                raise ModelError(
                    f"{path} has the tensor {min(repeated)!r}, which another file of the model has "
                    "as well: download the model again, or remove the file that does not belong "
                    "to it"
                )
            homes |= stored
        for part, replacement in model.renamed_tensors:
            homes = {name.replace(part, replacement): home for name, home in homes.items()}
        prefix, head = model.optional_prefix, model.head.untied_name
        if model.multimodal_class is not None:
            homes = {rename_tensor(name, prefix, head): home for name, home in homes.items()}
        if any(name.startswith(prefix) for name in homes):
            return homes
        # As the model without its head was saved.
        self._may_lack_head = True
        return {
            name if name.rpartition(".")[0] == head else prefix + name: home
            for name, home in homes.items()
        }


class Weights:
    """Checkpoint tensors whose names have a common prefix, such as those of one layer."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str = "",
        quantization: str = "none",
        ranks: Ranks | None = None,
    ) -> None:
        """Select the tensors whose names begin with a prefix."""
        self._checkpoint = checkpoint
        self._prefix = prefix
        self.quantization = quantization
        """Format to which linear layers are quantized: a key of WEIGHT_FORMATS."""
        model = checkpoint.model
        self.ranks = ranks or Ranks(model.rank, model.ranks)
        """The ranks of the stage; modules with partial sums keep this object."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensors that `read` returns."""
        return self._checkpoint.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes in memory of all tensors of the checkpoint that were read so far."""
        return self._checkpoint.weight_bytes

    def at(self, part: str) -> "Weights":
        """Return the tensors whose names continue with `part` and a dot."""
        prefix = f"{self._prefix}{part}."
        return Weights(self._checkpoint, prefix, self.quantization, self.ranks)

    def reading_to_host(self) -> AbstractContextManager[None]:
        """Return a context in which tensors are read to the memory of the host."""
        return self._checkpoint.reading_to_host()

    def read(self, name: str, *shape: int) -> Tensor:
        """Read one tensor of this shape."""
        return self._checkpoint.read([self._prefix + name], [shape])

    def ones(self, *shape: int) -> Tensor:
        """Return ones of this shape, of the dtype and on the device of the tensors."""
        return torch.ones(*shape, dtype=self.dtype, device=self._checkpoint.device)

    def read_float32(self, name: str, *shape: int) -> Tensor:
        """Read one tensor of this shape in float32, whatever the compute dtype is."""
        return self._checkpoint.read([self._prefix + name], [shape], torch.float32)

    def read_stacked(
        self, names: Sequence[str], kind: str, rows: Sequence[int], *rest: int
    ) -> Tensor:
        """Read tensors `name.kind` of shapes [rows[i], *rest], stacked along dimension 0."""
        return torch.cat(self.read_parts(names, kind, rows, *rest))

    def read_parts(
        self, names: Sequence[str], kind: str, rows: Sequence[int], *rest: int
    ) -> list[Tensor]:
        """Read tensors `name.kind` of shapes [rows[i], *rest]; callers copy them."""
        full = [f"{self._prefix}{name}.{kind}" for name in names]
        return self._checkpoint.read_parts(full, [(count, *rest) for count in rows])

    def read_matrices(
        self, names: Sequence[str], rows: Sequence[int], inputs: int
    ) -> Sequence[Weight]:
        """Read weights [rows[i], inputs]; callers copy them.

        They stay in the checkpoint's format if the kernels multiply by it.
        """
        full = [f"{self._prefix}{name}.weight" for name in names]
        return self._checkpoint.read_matrices(full, [(count, inputs) for count in rows])

    def read_whole(self, name: str, *shape: int) -> Tensor:
        """Read one whole tensor of this shape, although this rank has only a part of it."""
        return self._checkpoint.read_whole(self._prefix + name, shape)
