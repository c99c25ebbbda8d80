"""Mistral.

Source: Jiang et al., "Mistral 7B" (2023).
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
    window_notes,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the spec of Mistral: Llama with a sliding window in all layers, if it is not null."""
    config.set_defaults(num_key_value_heads=8, sliding_window=4096)
    attention, mlp = attention_spec(config), gated_mlp_spec(config)
    windows = read_layer_windows(config, [True] * config.positive_int("num_hidden_layers"))
    layers = [pre_norm_layer(config, replace(attention, window=window), mlp) for window in windows]
    return decoder_model(config, layers, notes=window_notes(windows))
