"""One pipeline stage of a model: some layers, the embedding before the first of all, the final norm
and the LM head behind the last.

Owns the order of operations within a layer and a stage. The arithmetic is in gllm/kernels, what
there is to compute in a description (spec.py). Does not know files, requests and processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.attention_plan import AttentionPlan
from gllm.kernels.linear import linear, prepare
from gllm.kernels.rotary import Angles, inverse_frequencies, rotary_angles
from gllm.models import spec
from gllm.models.attention import Attention, LatentAttention, LayerCache, Step
from gllm.models.feed_forward import MLP, Experts
from gllm.models.loader import Weights
from gllm.models.parts import Norm, norm_of

HEAD_ROWS = 256
"""Most rows that the LM head computes at once; its output is vocabulary-wide."""


@dataclass(frozen=True, slots=True)
class StageInputs:
    """What every stage needs of a micro-batch."""

    token_ids: Tensor
    """[tokens] int64; empty but on the first stage."""
    positions: Tensor
    """[tokens] int64, of each token in its sequence."""
    attention: Mapping[int | None, AttentionPlan]
    """By window, for every window of the stage's layers."""


class Layer:
    """Attention and feed-forward, each added to the residual stream."""

    def __init__(self, described: spec.Layer, weights: Weights, hidden: int) -> None:
        self.parallel = described.parallel
        self.attention_norm = Norm(described.attention_norm, weights, hidden)
        self.attention: Attention | LatentAttention
        if isinstance(described.attention, spec.LatentAttention):
            self.attention = LatentAttention(described.attention, weights, hidden)
        else:
            self.attention = Attention(described.attention, weights, hidden)
        self.after_attention = norm_of(described.after_attention, weights, hidden)
        self.mlp_norm = norm_of(described.mlp_norm, weights, hidden)
        self.mlp: MLP | Experts
        if isinstance(described.mlp, spec.Experts):
            self.mlp = Experts(described.mlp, weights, hidden)
        else:
            self.mlp = MLP(described.mlp, weights, hidden)
        self.after_mlp = norm_of(described.after_mlp, weights, hidden)

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, step: Step, cache: LayerCache
    ) -> Tensor:
        """What this layer adds to the residual stream at last, [tokens, hidden].

        hidden [tokens, hidden]: the residual stream but for `delta`, what the layer before adds to
        it; everything up to the result is added to it in place.
        """
        normed = self.attention_norm.after(hidden, delta)
        attended = self.attention(normed, step, cache)
        if self.after_attention is not None:
            attended = self.after_attention(attended)
        if self.parallel:
            return attended + self.mlp(normed if self.mlp_norm is None else self.mlp_norm(hidden))
        assert self.mlp_norm is not None, "halves one after the other have a norm each"
        made = self.mlp(self.mlp_norm.after(hidden, attended))
        return made if self.after_mlp is None else self.after_mlp(made)


class Embedding:
    """From token ids to the residual stream."""

    def __init__(self, model: spec.Model, weights: Weights) -> None:
        described = model.embedding
        shape = (model.vocab_size, model.hidden_size)
        self.table = weights.read(f"{described.name}.weight", *shape)
        # As the table is: checkpoints were trained with a scale of their own precision.
        self.scale = torch.tensor(described.scale, dtype=self.table.dtype)
        self.scaled = described.scale != 1
        self.positions: Tensor | None = None
        if described.positions is not None:
            rows = described.positions.rows
            name = f"{described.positions.name}.weight"
            table = weights.read(name, rows, model.hidden_size)
            self.positions = table[described.positions.offset :]
        self.norm = norm_of(described.norm, weights, model.hidden_size)

    def __call__(self, inputs: StageInputs) -> Tensor:
        """The residual stream [tokens, hidden]."""
        hidden = functional.embedding(inputs.token_ids, self.table)
        if self.scaled:
            hidden = hidden * self.scale
        if self.positions is not None:
            hidden = hidden + functional.embedding(inputs.positions, self.positions)
        return hidden if self.norm is None else self.norm(hidden)


class Head:
    """The final norm, and from there to logits."""

    def __init__(self, model: spec.Model, weights: Weights, embedding: Embedding | None) -> None:
        described = model.head
        self.norm = Norm(model.norm, weights, model.hidden_size)
        if embedding is not None and described.name == model.embedding.name:
            weight = embedding.table
        else:
            shape = (model.vocab_size, model.hidden_size)
            weight = weights.read(f"{described.name}.weight", *shape)
        weight = functional.normalize(weight) if described.unit_rows else weight
        self.matrix = prepare(weight, weights.quantization)
        self.vocabulary = model.vocab_size
        bias = f"{described.name}.bias"
        self.bias = weights.read(bias, model.vocab_size) if described.bias else None
        self.scale, self.softcap = described.scale, described.softcap

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] float32 of hidden [rows, hidden]."""
        result = torch.empty(len(hidden), self.vocabulary, dtype=torch.float32)
        for begin in range(0, len(hidden), HEAD_ROWS):
            rows = slice(begin, begin + HEAD_ROWS)
            linear(self.norm(hidden[rows]), self.matrix, self.bias, result[rows])
        if self.scale != 1:
            result *= self.scale
        if self.softcap is not None:
            result = result.div_(self.softcap).tanh_().mul_(self.softcap)
        return result


class ModelStage:
    """The layers `layers` of a model, and what belongs before and behind them."""

    def __init__(self, model: spec.Model, weights: Weights, layers: range, longest: int) -> None:
        """`weights`: at the checkpoint's root; `longest`: tokens of the longest text served.

        Raises ModelError.
        """
        described = [model.layers[index] for index in layers]
        self.frequencies = {
            rope: inverse_frequencies(
                rope.kind, rope.dim, rope.theta, {**rope.parameters, "longest": longest}
            )
            for rope in {layer.attention.rope for layer in described}
            if rope is not None
        }
        self.embedding = Embedding(model, weights) if layers.start == 0 else None
        self.layers = [
            Layer(layer, weights.at(model.layer_name.format(index)), model.hidden_size)
            for layer, index in zip(described, layers, strict=True)
        ]
        is_last = layers.stop == model.num_layers
        self.head = Head(model, weights, self.embedding) if is_last else None

    def forward(
        self, inputs: StageInputs, hidden: Tensor | None, kv: Sequence[LayerCache]
    ) -> Tensor:
        """The residual stream [tokens, hidden] behind this stage's layers.

        hidden [tokens, hidden]: the same from the stage before, overwritten; None on the first; kv:
        the cache of each of this stage's layers.
        """
        if self.embedding is not None:
            hidden = self.embedding(inputs)
        assert hidden is not None, "a stage that is not the first needs activations"
        step = Step(inputs.attention, self._angles(inputs.positions))
        delta = None
        for layer, cache in zip(self.layers, kv, strict=True):
            delta = layer(hidden, delta, step, cache)
        return hidden if delta is None else hidden.add_(delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] float32 of hidden [rows, hidden], on the last stage only."""
        assert self.head is not None, "only the last stage has the LM head"
        return self.head(hidden)

    def _angles(self, positions: Tensor) -> dict[spec.Rope, Angles]:
        return {
            rope: rotary_angles(positions, *frequencies)
            for rope, frequencies in self.frequencies.items()
        }
