"""Seed-OSS.

Source: ByteDance Seed, "Seed-OSS" (2025), https://github.com/ByteDance-Seed/seed-oss.
"""

from gllm.models.config_reader import ConfigReader
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import attention_spec, decoder_model, gated_mlp_spec, pre_norm_layer


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Seed-OSS: Llama with separate switches for the biases."""
    config.set_defaults(num_key_value_heads=8, head_dim=128, attention_bias=True)
    config.ignore("residual_dropout")
    attention = attention_spec(
        config,
        qkv_bias=config.boolean("attention_bias"),
        out_bias=config.boolean("attention_out_bias"),
    )
    mlp = gated_mlp_spec(config, bias=config.boolean("mlp_bias"))
    layer = pre_norm_layer(config, attention, mlp)
    return decoder_model(config, [layer] * config.positive_int("num_hidden_layers"))
