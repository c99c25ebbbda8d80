"""Models whose MLP has a squared ReLU and no gate: Nemotron 4 and Minitron, Arcee's AFM, Jais 2.

Source: Parmar et al., "Nemotron-4 15B Technical Report" (2024), section 2; Arcee AI, "AFM-4.5B"
(2025), https://www.arcee.ai/blog/announcing-the-arcee-foundation-model-family; the configuration
published with Jais 2.
"""

from collections.abc import Callable
from typing import Any

from gllm.models.config_reader import ConfigReader
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import NormSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    layer_norm_spec,
    plain_mlp_spec,
    pre_norm_layer,
    rms_norm_spec,
)


def build_nemotron_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Nemotron: LayerNorm relative to 1, half of each head rotated."""

    def norm(config: ConfigReader, name: str) -> NormSpec:
        return layer_norm_spec(config, name, "norm_eps", offset=1.0)

    return _model(config, norm, {"partial": 0.5})


def build_arcee_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of AFM: Llama with another MLP."""
    config.set_defaults(rms_norm_eps=1e-5)
    return _model(config, rms_norm_spec)


def build_jais2_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Jais 2: LayerNorm, and biases everywhere."""
    config.set_defaults(attention_bias=True, mlp_bias=True)

    def norm(config: ConfigReader, name: str) -> NormSpec:
        return layer_norm_spec(config, name, "layer_norm_eps")

    return _model(config, norm)


def _model(
    config: ConfigReader,
    norm: Callable[[ConfigReader, str], NormSpec],
    rope: dict[str, Any] | None = None,
) -> ModelSpec:
    bias = config.boolean("attention_bias")
    attention = attention_spec(config, rope, bias, bias)
    mlp = plain_mlp_spec(
        config.positive_int("intermediate_size"),
        config.choice("hidden_act", {"relu2": "relu2"}, "relu2"),
        ("mlp.up_proj", "mlp.down_proj"),
        config.boolean("mlp_bias"),
    )
    layer = pre_norm_layer(config, attention, mlp, norm)
    count = config.positive_int("num_hidden_layers")
    return decoder_model(config, [layer] * count, norm=norm(config, "model.norm"))
