"""GLM-4: the first release in Hugging Face's format, and that of April 2025.

Source: GLM Team, "ChatGLM: A Family of Large Language Models from GLM-130B to GLM-4" (2024).
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.spec import LayerSpec, ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
    rms_norm_spec,
)


def build_glm_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of GLM-4 (2024): interleaved rotary embedding of half of each head."""
    return decoder_model(config, [_layer(config)] * config.positive_int("num_hidden_layers"))


def build_glm4_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of GLM-4 (2025): that of 2024 with norms also after each block."""
    layer = replace(
        _layer(config),
        post_attention_norm=rms_norm_spec(config, "post_self_attn_layernorm"),
        post_mlp_norm=rms_norm_spec(config, "post_mlp_layernorm"),
    )
    return decoder_model(config, [layer] * config.positive_int("num_hidden_layers"))


def _layer(config: ConfigReader) -> LayerSpec:
    config.set_defaults(
        attention_bias=True, head_dim=128, num_key_value_heads=2, rms_norm_eps=1.5625e-7
    )
    rope = {"partial": 0.5, "interleaved": True}
    attention = attention_spec(config, rope, qkv_bias=config.boolean("attention_bias"))
    return pre_norm_layer(
        config, attention, gated_mlp_spec(config, names=("gate_up_proj", "down_proj"))
    )
