"""Which weights draft: those of a small model, or of the served model's prediction head.

Without torch, so that the parent process checks a configuration with it.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gllm.models.config import ModelConfig, read_config
from gllm.models.errors import ModelError
from gllm.models.hub import find_folder
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import ModelSpec, PredictionHeadSpec
from gllm.scheduler.speculative_config import SpeculativeConfig


@dataclass(frozen=True)
class DraftPlan:
    """Weights of a draft: the folder, and the layers of a model in it."""

    model: ModelSpec
    """The small model, or the served model with its prediction head as a further layer."""
    layers: range
    """Layers that draft."""
    folder: Path | None
    """Folder of the weights; None for that of the served model."""
    head: PredictionHeadSpec | None = None
    """The prediction head; None for a small model."""

    @property
    def layer_specs(self) -> Sequence[LayerSpec]:
        """Specifications of the layers that draft."""
        return self.model.layers[self.layers.start : self.layers.stop]


def plan_draft(config: SpeculativeConfig | None, served: ModelConfig) -> DraftPlan | None:
    """Return the weights of a configured draft; None if drafts have none.

    Args:
        config: of speculation; None without it.
        served: configuration of the served model.

    Raises:
        ModelError: the small model is not on this machine, or not supported; or the served model
            has no prediction head.
    """
    if config is None or not config.is_drafted_by_stage:
        return None
    if config.method == "mtp":
        return _plan_head(served)
    assert config.model is not None, "checked with the method"
    folder = find_folder(config.model)
    if folder is None:
        raise ModelError(
            f"the draft model {config.model!r} is not on this machine, whose stage drafts with it: "
            "copy its folder here, or download it before, with `hf download`"
        )
    model = read_config(folder).model
    return DraftPlan(model, range(model.num_layers), folder)


def _plan_head(served: ModelConfig) -> DraftPlan:
    """Return the weights of a prediction head. Raises ModelError if there is none."""
    model = served.model
    head = model.prediction_head
    if head is None:
        raise ModelError(missing_head_reason(served.architecture))
    index = model.num_layers
    layer_name = model.layer_name_format.format(index)
    copies = "|".join(map(re.escape, head.copied_tensors))
    # The head has a norm of its own before the LM head.
    ignored = (*model.ignored_tensors, rf"{re.escape(model.norm.name)}\.(weight|bias)")
    # It attends to all keys, also where the model selects some: that concerns guesses alone.
    ignored = (*ignored, rf"{re.escape(layer_name)}\.self_attn\.indexer\..*")
    if copies:
        ignored = (*ignored, rf"{re.escape(layer_name)}\.({copies})\.weight")
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    fields |= {
        "layers": (*model.layers, head.layer),
        "norm": replace(head.norm, name=f"{layer_name}.{head.norm.name}"),
        "num_prediction_layers": model.num_prediction_layers - 1,
        "ignored_tensors": ignored,
    }
    return DraftPlan(_HeadModelSpec(**fields), range(index, index + 1), None, head)


@dataclass(frozen=True)
class _HeadModelSpec(ModelSpec):
    """A model with its prediction head as the last layer, which reads token ids."""

    def reads_token_ids(self, layers: range) -> bool:
        """Return True: the head has the token embedding."""
        return True


def missing_head_reason(architecture: str) -> str:
    """Return why a model cannot draft with a head of its own, and what to do.

    architecture: class of the model.
    """
    return (
        f"speculative_config: method mtp drafts with the checkpoint's multi-token prediction head, "
        f"but {architecture} has none that is implemented (num_nextn_predict_layers in config.json "
        "of DeepSeek V3, GLM-4.5 and MiMo): choose method ngram or draft_model"
    )


def find_draft_obstacle(draft: ModelSpec, max_model_len: int) -> str | None:
    """Return why a small model cannot draft, and what to do; None if it can.

    Args:
        draft: the small model.
        max_model_len: longest sequence served, in tokens.
    """
    if draft.has_state:
        return (
            "it has recurrent layers, whose states cannot go back behind a wrong guess: choose a "
            "model without recurrent layers"
        )
    if draft.context_length < max_model_len:
        return (
            f"its context is {draft.context_length} tokens, but sequences have up to "
            f"{max_model_len}: lower max_model_len, or choose another one"
        )
    return None
