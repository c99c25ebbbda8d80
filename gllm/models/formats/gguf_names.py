"""Names and orders of tensors in GGUF files: which stored rows a model's tensor has.

llama.cpp's converter renames all tensors. It stacks experts, reorders queries and keys of models
whose rotary halves it stores interleaved, orders fused projections by query, key and value, adds
the 1 of Gemma's norms, and transposes GPT-2's weights. `GgufModel` undoes that: it follows the
structure of the ModelSpec, not the names that the family has for its tensors.

Source: llama.cpp's `conversion/`, the tensor map of its Python package `gguf`, and its list of
architectures.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from gllm.models.errors import ModelError
from gllm.models.formats.gguf_file import GgufBytes, GgufFile, GgufTensor
from gllm.models.formats.gguf_tensors import GgufLatentTensor, GgufRows, GgufStoredTensor, Rows
from gllm.models.formats.gguf_types import grouped_type
from gllm.models.spec.attention import AttentionSpec, LatentAttentionSpec
from gllm.models.spec.feed_forward import ExpertsSpec, MLPSpec
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import LinearSpec, NormSpec
from gllm.models.spec.recurrent import ShortConvSpec

INTERLEAVED = frozenset(
    {"arcee", "baichuan", "deepseek", "granite", "granitemoe", "llama", "smollm3"}
)
"""Architectures whose queries and keys are stored with interleaved rotary halves, although the
original model has one half after the other."""
MLP_NORM_AFTER_ATTENTION = frozenset({"glm4moe", "gpt-oss", "seed_oss"})
"""Architectures that name the norm before the feed-forward block after attention."""
IGNORED = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.attn_rot_embd.*")
"""Tensors that the configuration has, not the weights."""

Slice = tuple[str, Rows | None]
"""Name of a stored tensor without its end, and its rows in the model's order; None for all."""


def check_tensor_type(file: GgufFile, tensor: GgufTensor) -> None:
    """Raise ModelError if the type of a tensor is not implemented."""
    if IGNORED.fullmatch(tensor.name):
        return
    try:
        grouped_type(tensor.type.name)
    except ModelError as error:
        raise ModelError(f"{file.path}: tensor {tensor.name!r}: {error}") from error


class GgufModel:
    """Tensors of a model in GGUF files, by the names that its ModelSpec has."""

    def __init__(self, files: Sequence[tuple[GgufFile, GgufBytes]], model: ModelSpec) -> None:
        """Find all tensors of the model.

        Args:
            files: the model's files, and their readers.
            model: the whole model, or the part of a rank.

        Raises:
            ModelError: a tensor is missing, or is none of the model's.
        """
        self._model = model
        self._path = files[0][0].path
        self._architecture = files[0][0].architecture
        self._stored: dict[str, tuple[GgufBytes, GgufTensor]] = {}
        for file, reader in files:
            for name, tensor in file.tensors.items():
                if name in self._stored:
                    raise ModelError(
                        f"{file.path} has the tensor {name!r}, which another file of the model has "
                        "as well: name the first file of the model, with its own other files "
                        "beside it"
                    )
                check_tensor_type(file, tensor)
                self._stored[name] = reader, tensor
        # Also queries and keys of layers without a rope are reordered then.
        self._has_rope = any(layer.attention.rope is not None for layer in model.layers)
        self._used: set[str] = set()
        self.tensors: dict[str, GgufStoredTensor] = {}
        """Tensors by the model's names."""
        self._add_ends()
        for index, layer in enumerate(model.layers):
            self._prefix = f"blk.{index}."
            self._layer = model.layer_name_format.format(index) + "."
            self._add_layer(layer)
        self._check_all_used()

    def _add_ends(self) -> None:
        """Add the tensors outside of layers."""
        model = self._model
        self._prefix = self._layer = ""
        self._add(model.embedding.name, "weight", [("token_embd", None)])
        if model.embedding.positions is not None:
            self._add(model.embedding.positions.name, "weight", [("position_embd", None)])
        self._add_norm(model.embedding.norm, "token_embd_norm")
        # LFM2's final norm has the name of a norm after the embedding in most files.
        is_odd = self._architecture == "lfm2" and "output_norm.weight" not in self._stored
        self._add_norm(model.norm, "token_embd_norm" if is_odd else "output_norm")
        if "output.weight" in self._stored:
            name = model.head.untied_name if model.is_head_tied else model.head.name
            self._add(name, "weight", [("output", None)])
        elif not model.is_head_tied:
            raise self._missing("output.weight")
        if model.head.has_bias:
            self._add(model.head.name, "bias", [("output", None)])

    def _add_layer(self, layer: LayerSpec) -> None:
        """Add the tensors of a layer."""
        before, after = "attn_norm", "ffn_norm"
        if self._architecture == "falcon" and layer.mlp_norm is not None:
            before, after = "attn_norm_2", "attn_norm"
        if self._architecture in MLP_NORM_AFTER_ATTENTION:
            after = "post_attention_norm"
        self._add_norm(layer.attention_norm, before)
        self._add_norm(layer.mlp_norm, after)
        self._add_norm(layer.post_attention_norm, "post_attention_norm")
        self._add_norm(layer.post_mlp_norm, "post_ffw_norm")
        if isinstance(layer.attention, LatentAttentionSpec):
            self._add_latent_attention(layer.attention)
        elif isinstance(layer.attention, ShortConvSpec):
            self._add_short_conv(layer.attention)
        else:
            assert isinstance(layer.attention, AttentionSpec), "no GGUF files of other blocks"
            self._add_attention(layer.attention)
        if isinstance(layer.mlp, ExpertsSpec):
            self._add_experts(layer.mlp)
        else:
            assert layer.mlp is not None, "no GGUF files of layers without a feed-forward block"
            self._add_mlp(layer.mlp, "")

    def _add_attention(self, spec: AttentionSpec) -> None:
        heads, kv_heads = _total_heads(spec)
        counts = heads, kv_heads, kv_heads
        if f"{self._prefix}attn_qkv.weight" in self._stored:
            ends = np.cumsum([count * spec.head_dim for count in counts]).tolist()
            begins = 0, *ends[:-1]
            slices: list[Slice] = [
                ("attn_qkv", range(begin, end)) for begin, end in zip(begins, ends, strict=True)
            ]
        else:
            parts = zip(("attn_q", "attn_k", "attn_v"), counts, strict=True)
            slices = [(name, range(count * spec.head_dim)) for name, count in parts]
        if self._architecture in INTERLEAVED and self._has_rope:
            for index, count in enumerate(counts[:2]):
                name, rows = slices[index]
                assert rows is not None, "the slices have rows"
                slices[index] = name, _uninterleaved(count, spec.head_dim) + rows[0]
        if spec.is_grouped_by_kv_head:
            slices = _grouped(slices, heads, kv_heads, spec.head_dim)
        self._add_linear(spec.qkv_proj, slices)
        self._add_linear(spec.out_proj, [("attn_output", None)])
        if spec.sinks is not None:
            sinks = self._rows(f"{self._prefix}attn_sinks.weight", None, is_vector=True)
            self.tensors[self._layer + spec.sinks] = GgufStoredTensor((sinks,), (len(sinks.rows),))
        self._add_norm(spec.query_norm, "attn_q_norm", spec.has_norm_per_head)
        self._add_norm(spec.key_norm, "attn_k_norm", spec.has_norm_per_head)

    def _add_short_conv(self, spec: ShortConvSpec) -> None:
        self._add_linear(spec.in_proj, [("shortconv.in_proj", None)])
        self._add_linear(spec.out_proj, [("shortconv.out_proj", None)])
        name = self._layer + spec.conv.names[0]
        self._add(name, "weight", [("shortconv.conv", None)])
        weight = self.tensors[f"{name}.weight"]
        channels, size = weight.shape
        self.tensors[f"{name}.weight"] = replace(weight, shape=(channels, 1, size))
        if spec.conv.has_bias:
            self._add(name, "bias", [("shortconv.conv", None)])

    def _add_latent_attention(self, spec: LatentAttentionSpec) -> None:
        self._add_linear(spec.q_proj, [("attn_q" if spec.q_norm is None else "attn_q_b", None)])
        if spec.q_down_proj is not None:
            self._add_linear(spec.q_down_proj, [("attn_q_a", None)])
        self._add_norm(spec.q_norm, "attn_q_a_norm")
        self._add_linear(spec.kv_down_proj, [("attn_kv_a_mqa", None)])
        self._add_norm(spec.kv_norm, "attn_kv_a_norm")
        self._add_linear(spec.out_proj, [("attn_output", None)])
        if f"{self._prefix}attn_kv_b.weight" in self._stored:
            self._add_linear(spec.kv_up_proj, [("attn_kv_b", None)])
        else:
            self._add_latent_up_proj(spec)

    def _add_latent_up_proj(self, spec: LatentAttentionSpec) -> None:
        """Add the up projection of keys and values that is stored as two tensors."""
        shards, rank = spec.kv_up_proj.rows, spec.kv_lora_rank
        outputs = spec.nope_head_dim + spec.value_dim
        heads = shards[0].size // outputs if shards else spec.num_heads
        names = [f"{self._prefix}{part}.weight" for part in ("attn_k_b", "attn_v_b")]
        shapes = (heads, rank, spec.nope_head_dim), (heads, spec.value_dim, rank)
        for name, shape in zip(names, shapes, strict=True):
            if name not in self._stored:
                raise self._missing(name)
            stored = self._stored[name][1].shape
            if stored != shape:
                raise ModelError(
                    f"{self._path}: tensor {name!r} has shape {stored}, but by the file's metadata "
                    f"it has to be {shape}: convert the model again"
                )
        parts = tuple(self._rows(name, None, is_vector=False) for name in names)
        name = f"{self._layer}{spec.kv_up_proj.names[0]}.weight"
        self.tensors[name] = GgufLatentTensor(parts, (heads * outputs, rank), num_heads=heads)

    def _add_mlp(self, spec: MLPSpec, end: str) -> None:
        """Add a feed-forward block whose tensors have names with an end, such as "_shexp"."""
        size = _total_intermediate(spec)
        up: list[Slice] = [(f"ffn_up{end}", None)]
        if spec.is_gated and f"{self._prefix}ffn_gate{end}.weight" in self._stored:
            up.insert(0, (f"ffn_gate{end}", None))
        elif spec.is_gated:
            up = [(f"ffn_up{end}", range(size)), (f"ffn_up{end}", range(size, 2 * size))]
        self._add_linear(spec.up_proj, up)
        self._add_linear(spec.down_proj, [(f"ffn_down{end}", None)])

    def _add_experts(self, spec: ExpertsSpec) -> None:
        self._add_linear(spec.router, [("ffn_gate_inp", None)])
        if spec.correction_bias is not None:
            name, _, end = spec.correction_bias.rpartition(".")
            self._add(self._layer + name, end, [("exp_probs_b", None)], stored_end="bias")
        size, hidden = _total_intermediate(spec.expert), self._model.hidden_size
        kinds = (
            (spec.expert.up_proj, ("ffn_gate", "ffn_up"), size),
            (
                spec.expert.down_proj,
                ("ffn_down",),
                hidden,
            ),
        )
        is_stacked = f"{self._prefix}ffn_down_exps.weight" in self._stored
        for linear, stored, outputs in kinds:
            for expert in range(spec.num_experts):
                names = tuple(name.format(expert) for name in linear.names)
                rows = range(expert * outputs, (expert + 1) * outputs)
                slices: list[Slice] = [
                    (f"{name}_exps", rows) if is_stacked else (f"{name}.{expert}", None)
                    for name in stored
                ]
                self._add_linear(replace(linear, names=names), slices)
        if spec.shared_expert is not None:
            self._add_mlp(spec.shared_expert, "_shexp")
        if spec.shared_expert_gate is not None:
            self._add_linear(spec.shared_expert_gate, [("ffn_gate_inp_shexp", None)])

    def _add_linear(self, spec: LinearSpec, slices: Sequence[Slice]) -> None:
        """Add weight and bias of a linear layer; the slices are those of all its tensors."""
        if len(spec.names) == len(slices):
            groups: list[Sequence[Slice]] = [[part] for part in slices]
        else:
            assert len(spec.names) == 1, "one tensor has all slices, or each has one"
            groups = [slices]
        for name, group in zip(spec.names, groups, strict=True):
            full = self._layer + name
            self._add(full, "weight", group, is_transposed=spec.is_transposed)
            if spec.has_bias:
                self._add(full, "bias", group)

    def _add_norm(self, spec: NormSpec | None, stored: str, is_per_head: bool = False) -> None:
        if spec is None:
            return
        name = self._layer + spec.name
        self._add(name, "weight", [(stored, None)], spec.offset, is_vector=not is_per_head)
        if spec.has_bias:
            self._add(name, "bias", [(stored, None)])

    def _add(
        self,
        name: str,
        end: str,
        slices: Iterable[Slice],
        offset: float = 0.0,
        is_transposed: bool = False,
        is_vector: bool = False,
        stored_end: str | None = None,
    ) -> None:
        """Add a tensor of the model.

        Args:
            name: the model's name, without its end.
            end: "weight" or "bias".
            slices: the stored rows, without the layer's prefix and the end.
            offset: is subtracted from the numbers.
            is_transposed: True if the model has [inputs, outputs].
            is_vector: True if a weight has one dimension.
            stored_end: end of the stored names; None for `end`.
        """
        is_vector = is_vector or end != "weight"
        parts = tuple(
            self._rows(f"{self._prefix}{stored}.{stored_end or end}", rows, is_vector)
            for stored, rows in slices
        )
        count = sum(len(part.rows) for part in parts)
        shape: tuple[int, ...] = (count,) if is_vector else (count, parts[0].inputs)
        if is_transposed and not is_vector:
            shape = shape[1], shape[0]
        self.tensors[f"{name}.{end}"] = GgufStoredTensor(
            parts, shape, offset, is_transposed and not is_vector
        )

    def _rows(self, name: str, rows: Rows | None, is_vector: bool) -> GgufRows:
        """Return rows of a stored tensor. Raises ModelError if it lacks them."""
        if name not in self._stored:
            raise self._missing(name)
        file, tensor = self._stored[name]
        self._used.add(name)
        inputs = 1 if is_vector else tensor.shape[-1]
        count = math.prod(tensor.shape) // inputs
        if is_vector and tensor.type.weights != 1:
            raise ModelError(
                f"{self._path}: tensor {name!r} is of type {tensor.type.name}, but has to be one "
                "of floats: convert the model again"
            )
        rows = range(count) if rows is None else rows
        if (rows[-1] if isinstance(rows, range) else rows.max()) >= count:
            raise ModelError(
                f"{self._path}: tensor {name!r} has {count} rows, but by the file's metadata it "
                f"has to have more: convert the model again"
            )
        return GgufRows(file, tensor, rows, inputs)

    def _missing(self, name: str) -> ModelError:
        return ModelError(
            f"{self._path} lacks the tensor {name!r}, which a model of the architecture "
            f"{self._architecture!r} has: download it again, or convert it again"
        )

    def _check_all_used(self) -> None:
        """Raise ModelError if a stored tensor is none of the model's."""
        last = self._model.num_layers
        further = tuple(
            f"blk.{last + index}." for index in range(self._model.num_prediction_layers)
        )
        names = [
            name
            for name in self._stored.keys() - self._used
            if not IGNORED.fullmatch(name) and not (further and name.startswith(further))
        ]
        if names:
            names.sort()
            raise ModelError(
                f"{self._path} has tensors that its architecture {self._architecture!r} has no use "
                f"for, so it would be computed wrongly: {', '.join(names[:5])} ({len(names)} in "
                "all)"
            )


def _total_heads(spec: AttentionSpec) -> tuple[int, int]:
    """Return the query heads and the KV heads of all ranks."""
    heads = spec.total_num_heads or spec.num_heads
    shards = spec.qkv_proj.rows
    if not shards:
        return heads, spec.num_kv_heads
    if len(shards) > 1:
        return heads, shards[1].size // spec.head_dim
    return heads, (shards[0].size // spec.head_dim - heads) // 2


def _total_intermediate(spec: MLPSpec) -> int:
    """Return the inner size of a feed-forward block, of all ranks."""
    columns = spec.down_proj.columns
    return spec.intermediate_size if columns is None else columns.size


@cache
def _uninterleaved(num_heads: int, head_dim: int) -> NDArray[np.int64]:
    """Return the stored row of each row of queries or keys whose rotary halves are interleaved."""
    rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _grouped(
    slices: Sequence[Slice], num_heads: int, num_kv_heads: int, head_dim: int
) -> list[Slice]:
    """Return slices of queries, keys and values as a model has them that stores KV head by KV head.

    Each KV head has its queries, its key and its value.
    """

    def by_kv_head() -> Iterator[Slice]:
        group = num_heads // num_kv_heads * head_dim
        for index in range(num_kv_heads):
            for (name, rows), size in zip(slices, (group, head_dim, head_dim), strict=True):
                assert rows is not None, "the slices have rows"
                yield name, rows[index * size : (index + 1) * size]

    parts = list(by_kv_head())
    names = {name for name, _ in parts}
    if len(names) > 1:
        return parts
    rows = np.concatenate([np.asarray(rows) for _, rows in parts])
    return [(names.pop(), rows)]
