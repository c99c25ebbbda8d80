"""StableLM 3B and StableLM 2.

Source: Bellagente et al., "Stable LM 2 1.6B Technical Report" (2024), section 2.3.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import NormSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    layer_norm_spec,
    pre_norm_layer,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of StableLM: Llama with LayerNorm and a quarter of each head rotated."""
    config.set_defaults(num_key_value_heads=32)
    config.require_value("qk_layernorm", False)
    config.require_value("rotary_scaling_factor", 1)
    config.ignore("norm_eps")
    attention = attention_spec(config, {"partial": 0.25}, config.boolean("use_qkv_bias"))
    layer = pre_norm_layer(config, attention, gated_mlp_spec(config), _norm)
    if config.boolean("use_parallel_residual"):
        layer = replace(layer, mlp_norm=None, is_parallel=True)
    count = config.positive_int("num_hidden_layers")
    return decoder_model(config, [layer] * count, norm=_norm(config, "model.norm"))


def _norm(config: ConfigReader, name: str) -> NormSpec:
    return layer_norm_spec(config, name, "layer_norm_eps")
