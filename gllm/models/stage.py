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
from gllm.kernels.linear import has_lookup, linear, lookup_rows, prepare
from gllm.kernels.linear_unquantized import unpacked
from gllm.kernels.rotary import RotaryAngles, compute_inverse_frequencies, compute_rotary_angles
from gllm.kernels.weight_format import Matrix
from gllm.models import spec
from gllm.models.attention import LayerCache, Step
from gllm.models.layer import Layer
from gllm.models.layers import Layers
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


class Embedding:
    """From token ids to the residual stream."""

    def __init__(self, model: spec.Model, weights: Weights, shared: Matrix | None) -> None:
        """`shared`: the LM head's weight, where it is the same and on this stage."""
        described = model.embedding
        if shared is None:
            shape = (model.vocab_size, model.hidden_size)
            shared = unpacked(weights.read(f"{described.name}.weight", *shape))
        self.table = shared
        # As the table is: checkpoints were trained with a scale of their own precision.
        self.scale = torch.tensor(described.scale, dtype=weights.dtype)
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
        hidden = lookup_rows(self.table, inputs.token_ids)
        if self.scaled:
            hidden = hidden * self.scale
        if self.positions is not None:
            hidden = hidden + functional.embedding(inputs.positions, self.positions)
        return hidden if self.norm is None else self.norm(hidden)


class Head:
    """The final norm, and from there to logits."""

    def __init__(self, model: spec.Model, weights: Weights) -> None:
        described = model.head
        self.norm = Norm(model.norm, weights, model.hidden_size)
        parts = weights.parts([described.name], "weight", [model.vocab_size], model.hidden_size)
        if described.unit_rows:
            parts = [functional.normalize(part) for part in parts]
        self.matrix = prepare(parts, weights.quantization)
        self.is_tied = model.head_is_tied and not described.unit_rows
        self.vocabulary = model.vocab_size
        bias = f"{described.name}.bias"
        self.bias = weights.read(bias, model.vocab_size) if described.bias else None
        self.scale, self.softcap = described.scale, described.softcap

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] float32 of hidden [rows, hidden]."""
        shape = len(hidden), self.vocabulary
        result = torch.empty(shape, dtype=torch.float32, device=hidden.device)
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
            rope: compute_inverse_frequencies(
                rope.kind, rope.dim, rope.theta, {**rope.parameters, "longest": longest}
            )
            for rope in {layer.attention.rope for layer in described}
            if rope is not None
        }
        made = [
            Layer(layer, weights.at(model.layer_name.format(index)), model.hidden_size)
            for layer, index in zip(described, layers, strict=True)
        ]
        self.layers = Layers(made, described, model.hidden_size)
        is_last = layers.stop == model.num_layers
        self.head = Head(model, weights) if is_last else None
        matrix = self.head.matrix if self.head is not None and self.head.is_tied else None
        shared = matrix if matrix is not None and has_lookup(matrix) else None
        self.embedding = Embedding(model, weights, shared) if layers.start == 0 else None

    def forward(
        self, inputs: StageInputs, hidden: Tensor | None, kv: Sequence[LayerCache]
    ) -> Tensor:
        """The residual stream [tokens, hidden] behind this stage's layers.

        hidden [tokens, hidden]: the same from the stage before, overwritten; None on the first; kv:
        the cache of each of this stage's layers, always the same. The result is good until the next
        call.
        """
        if self.embedding is not None:
            hidden = self.embedding(inputs)
        assert hidden is not None, "a stage that is not the first needs activations"
        step = Step(inputs.attention, self._angles(inputs.positions))
        return self.layers(hidden, step, kv)

    def normed(self, hidden: Tensor) -> Tensor:
        """What the LM head looks at, [rows, hidden] float32, of hidden [rows, hidden]; on the last
        stage only."""
        assert self.head is not None, "only the last stage has the final norm"
        return self.head.norm(hidden).to(torch.float32)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] float32 of hidden [rows, hidden], on the last stage only."""
        assert self.head is not None, "only the last stage has the LM head"
        return self.head(hidden)

    def _angles(self, positions: Tensor) -> dict[spec.Rope, RotaryAngles]:
        return {
            rope: compute_rotary_angles(positions, *frequencies)
            for rope, frequencies in self.frequencies.items()
        }
