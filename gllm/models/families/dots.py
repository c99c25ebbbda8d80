"""dots.llm1.

Source: rednote-hilab, "dots.llm1 Technical Report" (2025), section 2.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import read_sparse_layers, v3_experts_spec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
    read_layer_windows,
    with_head_norms,
)


def build_dots1_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of dots.llm1: the attention of Qwen3, the experts of DeepSeek V3."""
    config.set_defaults(first_k_dense_replace=0, num_key_value_heads=32, sliding_window=4096)
    bias = config.boolean("attention_bias")
    attention = with_head_norms(config, attention_spec(config, None, bias, bias))
    dense, experts = gated_mlp_spec(config), v3_experts_spec(config)
    first = config.non_negative_int("max_window_layers", default=62)
    is_sparse = read_sparse_layers(config)
    windows = read_layer_windows(config, [layer >= first for layer in range(len(is_sparse))])
    layers = [
        pre_norm_layer(config, replace(attention, window=window), experts if sparse else dense)
        for window, sparse in zip(windows, is_sparse, strict=True)
    ]
    return decoder_model(config, layers)
