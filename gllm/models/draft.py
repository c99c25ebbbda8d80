"""Drafts with weights: a small model, or the multi-token prediction head of a checkpoint.

Both compute a residual stream and logits from token ids, with keys and values of their own in the
blocks of the served model. `gllm.runtime.worker.stage_drafter` decides which tokens they compute.
"""

import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gllm.kernels.linear import has_lookup
from gllm.models.attention import LayerCache
from gllm.models.basic_layers import Linear, Norm
from gllm.models.draft_plan import DraftPlan
from gllm.models.large_pages import use_large_pages
from gllm.models.loader import Checkpoint, Weights
from gllm.models.spec.model import ModelSpec, PredictionHeadSpec
from gllm.models.stage import (
    ENDS,
    Embedding,
    LMHead,
    ModelStage,
    ReusableParts,
    StageInputs,
)


class DraftModel:
    """A small model of the same vocabulary."""

    lag = 0
    """Positions by which keys and values of a token are before its own position."""
    needs_hidden = False
    """True if the inputs include hidden states of the served model."""

    def __init__(self, stage: ModelStage, vocab_size: int) -> None:
        """Create from all layers of the small model."""
        self._stage = stage
        self.vocab_size = vocab_size
        """Tokens that it knows."""
        self.weight_bytes = stage.weight_bytes
        """Bytes of weights that the served model does not share."""

    def forward(
        self, inputs: StageInputs, hidden: Tensor | None, caches: Sequence[LayerCache]
    ) -> Tensor:
        """Return the residual stream [tokens, hidden] after the layers, valid until the next call.

        Args:
            inputs: token ids, the positions of their keys and values, and attention plans.
            hidden: not used.
            caches: KV cache of each layer.
        """
        return self._stage.forward(inputs, None, caches)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [rows, vocabulary] float32 of [rows, hidden]."""
        return self._stage.compute_logits(hidden)

    @property
    def parts(self) -> list[object]:
        """Modules with the weights."""
        return self._stage.parts

    def release_workspace(self) -> None:
        """Free the memory of steps, before the KV cache is replaced."""
        self._stage.release_workspace()


class PredictionHead(DraftModel):
    """A multi-token prediction head: one layer on a token and the hidden state before it.

    The keys and values of a token belong to the position of that hidden state. Of several heads the
    first one guesses all tokens, the later ones from its own hidden states.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2; the hidden state is
    that behind the final norm, as in vLLM and SGLang.
    """

    lag = 1
    needs_hidden = True

    def __init__(
        self, spec: PredictionHeadSpec, weights: Weights, stage: ModelStage, embedding: Embedding
    ) -> None:
        """Read the norms and the projection before the layer.

        Args:
            spec: of the head.
            weights: tensors of the head's layer.
            stage: the layer, with the final norm of the head and the LM head.
            embedding: of the served model.
        """
        super().__init__(stage, embedding.vocab_size)
        self._embedding = embedding
        hidden_size = spec.hidden_size
        self._embedding_norm = Norm(spec.embedding_norm, weights, hidden_size)
        self._hidden_norm = Norm(spec.hidden_norm, weights, hidden_size)
        self._projection = Linear(spec.projection, weights, [hidden_size], 2 * hidden_size)
        self._is_hidden_first = spec.is_hidden_first

    @property
    def parts(self) -> list[object]:
        """Modules with the weights, the shared ones too."""
        return [*super().parts, self._projection]

    def forward(
        self, inputs: StageInputs, hidden: Tensor | None, caches: Sequence[LayerCache]
    ) -> Tensor:
        """Return the residual stream [tokens, hidden] after the layer, valid until the next call.

        Args:
            inputs: token ids, the positions of the hidden states, and attention plans.
            hidden: state [tokens, hidden] before each token, of the served model or of this head.
            caches: KV cache of the layer.
        """
        assert hidden is not None, "a head reads hidden states"
        embedded = self._embedding_norm(self._embedding(inputs))
        normed = self._hidden_norm(hidden)
        parts = (normed, embedded) if self._is_hidden_first else (embedded, normed)
        return self._stage.forward(inputs, self._projection(torch.cat(parts, dim=-1)), caches)


def load_draft(
    plan: DraftPlan,
    folder: Path,
    dtype: torch.dtype,
    quantization: str,
    max_model_len: int,
    served: ModelStage | None = None,
) -> DraftModel:
    """Load the weights of a draft on the CPU.

    Args:
        plan: the weights.
        folder: of the served model.
        dtype: of weights and activations.
        quantization: format to which linear layers are quantized.
        max_model_len: longest sequence served, in tokens.
        served: last stage of the served model, whose whole embedding and LM head the prediction
            head shares; None to read them.

    Raises:
        ModelError: the folder does not have the weights.
    """
    model, layers, folder = plan.model, plan.layers, plan.folder or folder
    if plan.head is not None and served is not None:
        names = (re.escape(name) for name in _list_shared_tensors(model, served))
        ignored = (*model.ignored_tensors, *(rf"{name}\.(weight|bias)" for name in names))
        model = replace(model, ignored_tensors=ignored)
    with Checkpoint(folder, dtype, model, layers) as checkpoint:
        weights, model = Weights(checkpoint, quantization=quantization), checkpoint.model
        draft = _read_draft(plan, model, weights, max_model_len, served)
        checkpoint.check_all_read()
    use_large_pages(draft.parts, weights.ranks)
    return draft


def _read_draft(
    plan: DraftPlan,
    model: ModelSpec,
    weights: Weights,
    max_model_len: int,
    served: ModelStage | None,
) -> DraftModel:
    """Read the weights of a draft; for the arguments see load_draft."""
    if plan.head is None:
        stage = ModelStage(model, weights, plan.layers, max_model_len)
        return DraftModel(stage, model.vocab_size)
    before = weights.num_bytes
    lm_head, embedding = _read_ends(model, weights, served)
    sizes = {ENDS: weights.num_bytes - before}
    held = ReusableParts(ends=(lm_head, None), part_bytes=sizes, ranks=weights.ranks)
    stage = ModelStage(model, weights, plan.layers, max_model_len, held)
    own = weights.at(model.layer_name_format.format(plan.layers.start))
    head = PredictionHead(plan.head, own, stage, embedding)
    head.weight_bytes = weights.num_bytes - before
    return head


def _read_ends(
    model: ModelSpec, weights: Weights, served: ModelStage | None
) -> tuple[LMHead, Embedding]:
    """Return LM head and embedding of a prediction head, those of the served model where loaded."""
    if served is None:
        lm_head = LMHead(model, weights)
    else:
        assert served.head is not None, "the last stage has the LM head"
        lm_head = copy.copy(served.head)
        lm_head.norm = Norm(model.norm, weights, model.hidden_size)
        if served.embedding is not None:
            return lm_head, served.embedding
    is_shared = lm_head.is_tied and has_lookup(lm_head.matrix)
    return lm_head, Embedding(model, weights, lm_head.matrix if is_shared else None)


def _list_shared_tensors(model: ModelSpec, served: ModelStage) -> list[str]:
    """Return the names of tensors that a prediction head takes from the served model's stage."""
    assert served.head is not None, "the last stage has the LM head"
    names = [model.head.name, model.head.untied_name]
    if served.embedding is not None:
        return [*names, model.embedding.name]
    is_read_as_embedding = served.head.is_tied and not has_lookup(served.head.matrix)
    return [name for name in names if not (is_read_as_embedding and name == model.embedding.name)]
