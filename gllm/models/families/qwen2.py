"""Qwen2 and Qwen2.5, dense.

Source: Yang et al., "Qwen2 Technical Report" (2024).
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.spec import ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
    read_layer_windows,
    read_sliding_window,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the spec of Qwen2; only queries, keys and values have biases."""
    attention, mlp = attention_spec(config, qkv_bias=True), gated_mlp_spec(config)
    return decoder_model(
        config,
        [
            pre_norm_layer(config, replace(attention, window=window), mlp)
            for window in qwen_windows(config)
        ],
    )


def qwen_windows(config: ConfigReader) -> list[int | None]:
    """Return the layers' windows: from layer max_window_layers on, if use_sliding_window is set."""
    layers = config.positive_int("num_hidden_layers")
    first = config.non_negative_int("max_window_layers", default=28)
    if not config.boolean("use_sliding_window"):
        read_sliding_window(config)
        config.require_value("layer_types", ["full_attention"] * layers)
        return [None] * layers
    return read_layer_windows(config, [layer >= first for layer in range(layers)])
