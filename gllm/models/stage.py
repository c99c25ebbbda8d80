"""One pipeline stage of a model.

A stage has consecutive layers; the first stage also has the embedding, the last one the LM head.
The arithmetic is in gllm/kernels; `gllm.models.spec` describes which of it a model uses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.attention_plan import AttentionPlan
from gllm.kernels.attention_window import AttentionWindow
from gllm.kernels.linear import has_lookup, linear, lookup_rows, prepare
from gllm.kernels.linear_unquantized import wrap_weight
from gllm.kernels.rotary import RotaryAngles, compute_inverse_frequencies, compute_rotary_angles
from gllm.kernels.state_plan import StatePlan
from gllm.kernels.token_selection import divide_tokens
from gllm.kernels.weight_format import Matrix, dequantize_weight, format_of, weight_format
from gllm.models.attention import ForwardContext, LayerCache
from gllm.models.basic_layers import Norm, optional_norm
from gllm.models.layers import DecoderLayer, DecoderLayers
from gllm.models.loader import Checkpoint, Weights
from gllm.models.ranks import Ranks
from gllm.models.spec.attention import AttentionSpec, LatentAttentionSpec
from gllm.models.spec.model import ModelSpec, PerLayerEmbeddingSpec
from gllm.models.spec.parts import DimensionShard, QueryScaleSpec, RopeSpec
from gllm.models.weight_cache.weight_cache import WeightCache

HEAD_ROWS = 256
"""Rows for which the LM head computes logits at once; its output is as wide as the vocabulary."""
ENDS = -1
"""Key of embedding and LM head among the parts of a stage."""


@dataclass(frozen=True, slots=True)
class StageInputs:
    """Inputs of a stage for one micro-batch: token ids, positions and attention plans."""

    token_ids: Tensor
    """[tokens] int64; empty except on the first stage and those with a per-layer embedding."""
    positions: Tensor
    """[tokens] int64: position of each token in its sequence."""
    attention: Mapping[AttentionWindow, AttentionPlan]
    """Attention plan for each window that layers have; the key None is full attention."""
    states: StatePlan | None = None
    """States that recurrent layers read and write; None if the stage has no such layer."""


class Embedding:
    """Token embedding of the first stage, with learned positions if the model has them."""

    def __init__(self, model: ModelSpec, weights: Weights, shared: Matrix | None) -> None:
        """Read the weights, unless they are those of the LM head on this stage (`shared`)."""
        spec = model.embedding
        self.rows = _token_range(spec.rows, model.vocab_size)
        """Tokens of the vocabulary that this rank has."""
        if shared is None:
            shared = _read_table(spec.name, weights, len(self.rows), model.hidden_size)
        self.table = shared
        self.vocab_size = model.vocab_size
        self._ranks = weights.ranks
        # In the weights' dtype: checkpoints were trained with a scale of that precision.
        self.scale = torch.tensor(spec.scale, dtype=weights.dtype)
        self.is_scaled = spec.scale != 1
        self.positions: Tensor | None = None
        if spec.positions is not None:
            rows = spec.positions.num_rows
            table = weights.read(f"{spec.positions.name}.weight", rows, model.hidden_size)
            self.positions = table[spec.positions.offset :]
        self.norm = optional_norm(spec.norm, weights, model.hidden_size)

    def __call__(self, inputs: StageInputs) -> Tensor:
        """Return the residual stream [tokens, hidden]."""
        hidden = self._look_up(inputs.token_ids)
        if self.is_scaled:
            hidden = hidden * self.scale
        if self.positions is not None:
            hidden = hidden + functional.embedding(inputs.positions, self.positions)
        return hidden if self.norm is None else self.norm(hidden)

    def _look_up(self, ids: Tensor) -> Tensor:
        """Return the embeddings [n, hidden] of ids [n], summed over the ranks: each has its rows.

        Raises:
            IndexError: on a CPU, an id is out of range.
        """
        if len(self.rows) == self.vocab_size:
            return lookup_rows(self.table, ids)
        if ids.is_cpu:
            check_token_ids(ids, self.vocab_size)
        local = ids - self.rows.start
        is_elsewhere = (local < 0) | (local >= len(self.rows))
        embeddings = lookup_rows(self.table, local.masked_fill(is_elsewhere, 0))
        embeddings.masked_fill_(is_elsewhere[:, None], 0)
        group = self._ranks.layers
        part = group.partial(*embeddings.shape)
        part = embeddings if part is None else part.copy_(embeddings)
        return group.sum(part, None, embeddings.dtype)


class PerLayerEmbedding:
    """The stage's part of the per-layer embedding: an addend of each of its layers."""

    def __init__(
        self, spec: PerLayerEmbeddingSpec, weights: Weights, layers: range, hidden_size: int
    ) -> None:
        """Read the columns of the stage's layers; every tensor parallel rank has all of them."""
        self.size = spec.size
        width = len(layers) * spec.size
        self.table = weights.read(f"{spec.name}.weight", spec.num_rows, width)
        projection = weights.read(f"{spec.projection}.weight", width, hidden_size)
        self.projection = prepare([projection], weights.quantization)
        self.projection_scale = hidden_size**-0.5
        # In the weights' dtype, as the token embedding's.
        self.scale = torch.tensor(spec.scale, dtype=weights.dtype)
        self.norm = Norm(spec.norm, weights, spec.size)

    def __call__(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return the part of each layer, [layers, tokens, size].

        Args:
            token_ids: [tokens] int64.
            hidden: token embedding [tokens, hidden] of the model.
        """
        projected = linear(hidden, self.projection, None) * self.projection_scale
        projected = self.norm(projected.view(len(hidden), -1, self.size))
        own = functional.embedding(token_ids, self.table) * self.scale
        parts = (projected + own.view(projected.shape)) * 2**-0.5
        return parts.transpose(0, 1).contiguous()


def _read_table(name: str, weights: Weights, rows: int, hidden_size: int) -> Matrix:
    """Read an embedding [rows, hidden], in the checkpoint's format if rows can be looked up."""
    parts = weights.read_matrices([name], [rows], hidden_size)
    if not isinstance(parts[0], Tensor) and format_of(parts[0]).has_lookup:
        return prepare(parts)
    return wrap_weight(torch.cat([dequantize_weight(part) for part in parts]))


def check_token_ids(ids: Tensor, vocab_size: int) -> None:
    """Raise IndexError if a token id is outside the vocabulary; waits for the device of the ids.

    Args:
        ids: token ids [n].
        vocab_size: size of the vocabulary.
    """
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise IndexError(f"a token id is outside the vocabulary of {vocab_size}")


class LMHead:
    """Final norm and LM head of the last stage: computes logits of hidden states."""

    def __init__(self, model: ModelSpec, weights: Weights) -> None:
        """Read the weights from the root of the checkpoint."""
        spec = model.head
        self.norm = Norm(model.norm, weights, model.hidden_size)
        self.rows = _token_range(spec.rows, model.vocab_size)
        """Tokens of the vocabulary that this rank has."""
        self._ranks = weights.ranks
        parts = weights.read_matrices([spec.name], [len(self.rows)], model.hidden_size)
        if spec.has_normalized_rows:
            parts = [functional.normalize(dequantize_weight(part)) for part in parts]
        head_format = weight_format(weights.quantization).head_format or weights.quantization
        self.matrix = prepare(parts, head_format)
        self.is_tied = model.is_head_tied and not spec.has_normalized_rows
        self.vocab_size = model.vocab_size
        bias = f"{spec.name}.bias"
        self.bias = weights.read(bias, len(self.rows)) if spec.has_bias else None
        self.scale, self.softcap = spec.scale, spec.softcap

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits [rows, vocabulary] float32 of hidden [rows, hidden].

        Rank 0 gathers the logits of all ranks. On the other ranks the result has no rows.
        """
        if len(self.rows) < self.vocab_size:
            return self._gather(hidden)
        logits = torch.empty(
            len(hidden), self.vocab_size, dtype=torch.float32, device=hidden.device
        )
        for begin in range(0, len(hidden), HEAD_ROWS):
            rows = slice(begin, begin + HEAD_ROWS)
            linear(self.norm(hidden[rows]), self.matrix, self.bias, logits[rows])
        return self._scale(logits)

    def _gather(self, hidden: Tensor) -> Tensor:
        """Return the logits of all ranks on rank 0, and no rows elsewhere."""
        group = self._ranks.head
        step = -(-self.vocab_size // group.size)
        sizes = [min(step, self.vocab_size - begin) for begin in range(0, self.vocab_size, step)]
        gathered: list[Tensor] = []
        for begin in range(0, len(hidden), HEAD_ROWS):
            normed = self.norm(hidden[begin : begin + HEAD_ROWS])
            part = normed.new_empty(len(normed), len(self.rows), dtype=torch.float32)
            linear(normed, self.matrix, self.bias, part)
            logits = group.gather(self._scale(part), sizes)
            if logits is not None:
                gathered.append(logits)
        if not gathered:
            return hidden.new_empty(0, self.vocab_size, dtype=torch.float32)
        return gathered[0] if len(gathered) == 1 else torch.cat(gathered)

    def _scale(self, logits: Tensor) -> Tensor:
        """Apply the scale and the cap, in place."""
        if self.scale != 1:
            logits *= self.scale
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


def _token_range(rows: DimensionShard | None, vocab_size: int) -> range:
    """Return the tokens of the vocabulary that a rank has, which follow each other."""
    if rows is None:
        return range(vocab_size)
    ((begin, end),) = rows.runs
    return range(begin, end)


def _read_ends(
    model: ModelSpec, weights: Weights, layers: range
) -> "tuple[LMHead | None, Embedding | None]":
    """Read the LM head and the embedding of a stage; None for what it does not have."""
    head = LMHead(model, weights) if layers.stop == model.num_layers else None
    matrix = head.matrix if head is not None and head.is_tied else None
    shared = matrix if matrix is not None and has_lookup(matrix) else None
    return head, Embedding(model, weights, shared) if model.reads_token_ids(layers) else None


@dataclass
class ReusableParts:
    """Layers, embedding and LM head in memory that a new stage uses instead of loading them."""

    layers: dict[int, DecoderLayer] = field(default_factory=dict)
    """Loaded layers by their indices in the model."""
    ends: tuple[LMHead | None, Embedding | None] | None = None
    """LM head and embedding, if the new stage has the same of the two; None if they have to be
    read."""
    per_layer_embedding: PerLayerEmbedding | None = None
    """Part of the per-layer embedding, together with `ends`."""
    part_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes of weights by layer index; those of embedding and LM head by `ENDS`."""
    ranks: Ranks | None = None
    """Tensor parallel rank of the loaded stages; None without stages."""

    def find_in(self, cache: WeightCache, model: ModelSpec, layers: range) -> None:
        """Add what a cache of packed weights has of a stage's other parts.

        Args:
            cache: whose modules have the same `ranks`.
            model: the whole model, or the part of this rank.
            layers: indices of the stage's layers.
        """
        for index in layers:
            if index not in self.layers and (cached := cache.load(index)) is not None:
                self.layers[index], self.part_bytes[index] = cached
        if self.ends is not None:
            return
        if not has_ends(model, layers):
            self.ends, self.part_bytes[ENDS] = (None, None), 0
        elif (cached := cache.load(ENDS)) is not None:
            (*ends, self.per_layer_embedding), self.part_bytes[ENDS] = cached
            self.ends = ends[0], ends[1]


def has_ends(model: ModelSpec, layers: range) -> bool:
    """Return True if a stage has the embedding, the LM head or both."""
    return layers.stop == model.num_layers or model.reads_token_ids(layers)


def describe_stage_part(model: ModelSpec, layers: range, index: int) -> object:
    """Return all of a model's specification that decides a part of a stage.

    Args:
        model: the whole model, or the part of this rank.
        layers: indices of the stage's layers.
        index: index of the layer; `ENDS` for embedding and LM head.
    """
    shared = model.hidden_size, model.quantization
    if index != ENDS:
        return model.layer_name_format.format(index), model.layers[index], *shared
    per_layer = model.per_layer_embedding
    return (
        *(layers.stop == model.num_layers, model.reads_token_ids(layers)),
        *(model.embedding, model.head, model.norm, model.vocab_size),
        *(per_layer, None if per_layer is None else layers, *shared),
    )


def find_reusable_parts(
    stages: "Sequence[ModelStage]", layers: range, num_layers: int
) -> ReusableParts:
    """Return the layers, embedding and LM head of loaded stages that a new stage can reuse.

    Embedding and LM head share a matrix in some models, so both are reused or neither is.

    Args:
        stages: loaded stages of one rank of one model, of equal dtype and format; those with
            another Ranks object than the first stage are ignored.
        layers: indices of the new stage's layers.
        num_layers: number of layers of the model.
    """
    held = ReusableParts()
    has_ends = layers.stop == num_layers, layers.start == 0
    for stage in stages:
        held.ranks = held.ranks or stage.ranks
        if stage.ranks is not held.ranks:
            continue
        for index, module in zip(stage.range, stage.layers.layers, strict=True):
            if index in layers and index not in held.layers:
                held.layers[index] = module
                held.part_bytes[index] = stage.part_bytes[index]
        ends = stage.head, stage.embedding
        per_layer = stage.per_layer_embedding
        # A per-layer embedding has the columns of the stage's layers.
        is_same = tuple(end is not None for end in ends) == has_ends
        if per_layer is not None:
            is_same = stage.range == layers
        if held.ends is None and is_same:
            held.ends, held.per_layer_embedding = ends, per_layer
            held.part_bytes[ENDS] = stage.part_bytes[ENDS]
    return held


def estimate_bytes(held: ReusableParts, layers: range, checkpoint: Checkpoint) -> float:
    """Estimate the bytes of memory that the remaining weights of a stage need once loaded.

    The estimate is the larger of the bytes in the files and the mean size of loaded layers times
    the
    number of remaining layers: the dtype in memory may differ from that of the files.

    Args:
        held: parts of the stage that are loaded already.
        layers: indices of the stage's layers.
        checkpoint: files with the remaining parts.
    """
    own = [held.part_bytes[index] for index in held.layers]
    mean = sum(own) / len(own) if own else 0.0
    return max(float(checkpoint.total_bytes), mean * (len(layers) - len(own)))


class ModelStage:
    """Consecutive layers of a model that one pipeline stage runs.

    The first stage also has the embedding, the last stage the LM head.
    """

    def __init__(
        self,
        model: ModelSpec,
        weights: Weights,
        layers: range,
        max_model_len: int,
        held: "ReusableParts | None" = None,
        cache: WeightCache | None = None,
    ) -> None:
        """Read the weights of a stage, except for parts that are in memory already.

        Args:
            model: the whole model, or the part of this rank.
            weights: all tensors of the checkpoint.
            layers: indices of the stage's layers.
            max_model_len: longest sequence served, in tokens; selects the factors of longrope.
            held: parts of other stages of this process, with the same `ranks` as the weights; None
                for none.
            cache: to which the parts that are read are written; None for none.

        Raises:
            ModelError: the checkpoint does not fit the model.
        """
        held = ReusableParts() if held is None else held
        self.range = layers
        """Indices of the stage's layers."""
        self.part_bytes: dict[int, int] = {}
        """Bytes of each layer's weights by its index; those of embedding and LM head by `ENDS`."""
        specs = [model.layers[index] for index in layers]
        self.frequencies = {
            rope: compute_inverse_frequencies(
                rope.kind, rope.dim, rope.theta, {**rope.parameters, "longest": max_model_len}
            )
            for rope in {spec.attention.rope for spec in specs}
            if rope is not None
        }
        self._num_selected = max(
            (
                spec.attention.num_selected
                for spec in specs
                if isinstance(spec.attention, LatentAttentionSpec)
                and spec.attention.num_selected is not None
            ),
            default=None,
        )
        """Keys that tokens of sparse attention see; None without such layers."""
        self.query_scales = {
            spec.attention.query_scale
            for spec in specs
            if isinstance(spec.attention, AttentionSpec | LatentAttentionSpec)
            and spec.attention.query_scale is not None
        }
        modules = []
        for spec, index in zip(specs, layers, strict=True):
            module = held.layers.get(index)
            if module is not None:
                self.part_bytes[index] = held.part_bytes[index]
            else:
                before = weights.num_bytes
                names = weights.at(model.layer_name_format.format(index))
                module = DecoderLayer(spec, names, model.hidden_size)
                self.part_bytes[index] = weights.num_bytes - before
                if cache is not None:
                    module = cache.store(index, module, self.part_bytes[index])
            modules.append(module)
        self.layers = DecoderLayers(modules, specs, model.hidden_size)
        self.head: LMHead | None
        self.embedding: Embedding | None
        self.per_layer_embedding = held.per_layer_embedding
        if held.ends is not None:
            self.head, self.embedding = held.ends
            self.part_bytes[ENDS] = held.part_bytes[ENDS]
        else:
            before = weights.num_bytes
            self.head, self.embedding = _read_ends(model, weights, layers)
            if (per_layer := model.per_layer_embedding) is not None:
                self.per_layer_embedding = PerLayerEmbedding(
                    per_layer, weights, layers, model.hidden_size
                )
            self.part_bytes[ENDS] = weights.num_bytes - before
            if cache is not None and has_ends(model, layers):
                parts = self.head, self.embedding, self.per_layer_embedding
                parts = cache.store(ENDS, parts, self.part_bytes[ENDS])
                self.head, self.embedding, self.per_layer_embedding = parts
        self.ranks = weights.ranks
        """The ranks that compute this stage together; they join the groups of each epoch."""

    @property
    def parts(self) -> list[object]:
        """Modules with the weights: each layer, then those of embedding and LM head."""
        return [*self.layers.layers, (self.head, self.embedding, self.per_layer_embedding)]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights of the stage."""
        return sum(self.part_bytes.values())

    def forward(
        self,
        inputs: StageInputs,
        hidden: Tensor | None,
        kv: Sequence[LayerCache],
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Return the residual stream [tokens, hidden] after this stage's layers.

        The result is valid until the next call.

        Args:
            inputs: the micro-batch.
            hidden: residual stream [tokens, hidden] of the previous stage, overwritten; None on the
                first stage.
            kv: KV cache of each layer of this stage, the same at every call.
            on_layer: called after each layer with the number of this stage's layers so far.
        """
        layer_embeddings = None
        if self.embedding is not None:
            embedded = self.embedding(inputs)
            if self.per_layer_embedding is not None:
                layer_embeddings = self.per_layer_embedding(inputs.token_ids, embedded)
            hidden = embedded if self.range.start == 0 else hidden
        assert hidden is not None, "every stage but the first requires activations"
        angles = self.compute_angles(inputs.positions)
        scales = self.compute_query_scales(inputs.positions)
        selection = None
        if self._num_selected is not None:
            selection = divide_tokens(inputs.attention[None], hidden.dtype, self._num_selected)
        context = ForwardContext(
            inputs.attention,
            angles,
            inputs.states,
            query_scales=scales,
            layer_embeddings=layer_embeddings,
            selection=selection,
        )
        return self.layers(hidden, context, kv, on_layer)

    def release_workspace(self) -> None:
        """Free the memory of steps, before the KV cache is replaced."""
        self.layers.release_workspace()

    def normalize(self, hidden: Tensor) -> Tensor:
        """Return the input of the LM head, [rows, hidden]; only on the last stage."""
        assert self.head is not None, "only the last stage has the final norm"
        return self.head.norm(hidden)

    def apply_final_norm(self, hidden: Tensor) -> Tensor:
        """Return the input of the LM head in float32, [rows, hidden]; only on the last stage."""
        return self.normalize(hidden).to(torch.float32)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [rows, vocabulary] float32 of [rows, hidden]; only on the last stage.

        The ranks of the stage compute them together; they have no rows on ranks other than 0.
        """
        assert self.head is not None, "only the last stage has the LM head"
        return self.head(hidden)

    def compute_angles(self, positions: Tensor) -> dict[RopeSpec, RotaryAngles]:
        """Return the rotary angles of positions [tokens], by kind of embedding."""
        return {
            rope: compute_rotary_angles(positions, *frequencies)
            for rope, frequencies in self.frequencies.items()
        }

    def compute_query_scales(self, positions: Tensor) -> dict[QueryScaleSpec, Tensor]:
        """Return the factors of the queries at positions [tokens]; on a CPU only if one is not 1.

        A GPU's positions are unknown to the host.
        """
        scales = {}
        for spec in self.query_scales:
            shifted = positions + spec.offset
            if positions.is_cpu and not bool((shifted >= spec.period).any()):
                continue
            periods = torch.div(shifted, spec.period, rounding_mode="floor")
            # Of float64, which hides that torch computes the last elements by another logarithm.
            factors = 1 + spec.beta * torch.log1p(periods.to(torch.float64))
            scales[spec] = factors.to(torch.float32)[:, None, None]
        return scales
