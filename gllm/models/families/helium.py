"""Helium.

Source: Kyutai, "Helium 1" (2025), https://kyutai.org/2025/04/30/helium.html.
"""

from gllm.models.config_reader import ConfigReader
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import attention_spec, decoder_model, gated_mlp_spec, pre_norm_layer


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Helium: Llama with interleaved rotary pairs."""
    config.set_defaults(
        head_dim=128, num_key_value_heads=20, rms_norm_eps=1e-8, rope_theta=100_000.0
    )
    attention = attention_spec(
        config, {"interleaved": True}, qkv_bias=config.boolean("attention_bias")
    )
    mlp = gated_mlp_spec(config, bias=config.boolean("mlp_bias"))
    layer = pre_norm_layer(config, attention, mlp)
    return decoder_model(config, [layer] * config.positive_int("num_hidden_layers"))
