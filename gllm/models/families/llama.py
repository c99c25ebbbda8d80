"""Llama 2 and 3, and what is built alike.

Source: Touvron et al., "Llama 2" (2023); Grattafiori et al., "The Llama 3 Herd of Models" (2024).
"""

from gllm.models.config_reader import ConfigReader
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
    read_layer_windows,
    windowed_layers,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Llama, with biases if config.json enables them."""
    bias = config.boolean("attention_bias")
    attention = attention_spec(config, qkv_bias=bias, out_bias=bias)
    mlp = gated_mlp_spec(config, bias=config.boolean("mlp_bias"))
    return decoder_model(
        config, [pre_norm_layer(config, attention, mlp)] * config.positive_int("num_hidden_layers")
    )


def build_cwm_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of CWM: Llama 3 with a window in three of four layers.

    Source: Meta FAIR, "CWM: An Open-Weights LLM" (2025), section 2.
    """
    config.set_defaults(
        head_dim=128,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        rope_theta=1_000_000.0,
        sliding_window=8192,
    )
    attention, mlp = attention_spec(config), gated_mlp_spec(config)
    slides = [layer % 4 != 0 for layer in range(config.positive_int("num_hidden_layers"))]
    windows = read_layer_windows(config, slides, required=True)
    return decoder_model(config, windowed_layers(config, attention, mlp, windows))
