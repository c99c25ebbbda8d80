"""Llama 2 and 3, and what is built alike.

Source: Touvron et al., "Llama 2" (2023); Grattafiori et al., "The Llama 3 Herd of Models" (2024).
"""

from gllm.models.config_reader import ConfigReader
from gllm.models.spec import ModelSpec
from gllm.models.spec_builders import attention_spec, decoder_model, gated_mlp_spec, pre_norm_layer


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Llama, with biases if config.json enables them."""
    bias = config.boolean("attention_bias")
    attention = attention_spec(config, qkv_bias=bias, out_bias=bias)
    mlp = gated_mlp_spec(config, bias=config.boolean("mlp_bias"))
    return decoder_model(
        config, [pre_norm_layer(config, attention, mlp)] * config.positive_int("num_hidden_layers")
    )
