"""SmolLM3.

Source: Hugging Face, "SmolLM3" (2025), https://huggingface.co/blog/smollm3.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
    read_layer_windows,
    read_rope_layers,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of SmolLM3: Llama without positions in every fourth layer."""
    config.set_defaults(num_key_value_heads=4, rope_theta=2_000_000.0)
    config.ignore("max_window_layers")
    bias = config.boolean("attention_bias")
    attention = attention_spec(config, qkv_bias=bias, out_bias=bias)
    mlp = gated_mlp_spec(config, bias=config.boolean("mlp_bias"))
    rotates, slides = read_rope_layers(config), config.boolean("use_sliding_window")
    windows = read_layer_windows(config, [slides and not rotated for rotated in rotates])
    return decoder_model(
        config,
        [
            pre_norm_layer(
                config,
                replace(
                    attention,
                    rope=attention.rope if is_rotated else None,
                    window=window if slides else None,
                ),
                mlp,
            )
            for is_rotated, window in zip(rotates, windows, strict=True)
        ],
        tied=True,
    )
