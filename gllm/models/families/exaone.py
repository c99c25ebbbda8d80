"""EXAONE 4 and K-EXAONE.

Source: LG AI Research, "EXAONE 4.0" (2025), section 2.1; "K-EXAONE Technical Report" (2026).
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import read_sparse_layers, v3_experts_spec
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    post_norm_layer,
    pre_norm_layer,
    read_layer_windows,
    read_sliding_window,
    with_head_norms,
)


def build_exaone4_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of EXAONE 4: norms after the blocks, windows in three of four layers.

    Layers with full attention have no positions where others have windows.
    """
    config.set_defaults(rms_norm_eps=1e-5, sliding_window=4096, num_key_value_heads=32)
    mlp = gated_mlp_spec(config)
    return decoder_model(
        config, [post_norm_layer(config, attention, mlp) for attention in _attentions(config)]
    )


def build_exaone_moe_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of K-EXAONE: the attention of EXAONE 4, the experts of DeepSeek V3."""
    config.set_defaults(
        rms_norm_eps=1e-5,
        sliding_window=4096,
        num_key_value_heads=32,
        first_k_dense_replace=1,
        moe_intermediate_size=1024,
        norm_topk_prob=True,
        num_experts=64,
        num_experts_per_tok=8,
        num_shared_experts=1,
        routed_scaling_factor=2.5,
    )
    config.ignore("num_nextn_predict_layers")
    dense = gated_mlp_spec(config)
    experts = replace(v3_experts_spec(config), correction_bias="mlp.e_score_correction_bias")
    layers = [
        pre_norm_layer(config, attention, experts if is_sparse else dense)
        for attention, is_sparse in zip(
            _attentions(config), read_sparse_layers(config), strict=True
        )
    ]
    return decoder_model(config, layers, ignored_tensors=(r"mtp\..*",))


def _attentions(config: ConfigReader) -> list[AttentionSpec]:
    """Return the attention of each layer."""
    attention = with_head_norms(config, attention_spec(config))
    everywhere = attention if read_sliding_window(config) is None else replace(attention, rope=None)
    windows = read_layer_windows(config, _slides(config))
    return [
        everywhere if window is None else replace(attention, window=window) for window in windows
    ]


def _slides(config: ConfigReader) -> list[bool]:
    """Return which layers have a window if `layer_types` does not say it."""
    count = config.positive_int("num_hidden_layers")
    if read_sliding_window(config) is None or config.has("layer_types"):
        # A pattern in letters, such as LLLG, says the same.
        config.ignore("sliding_window_pattern")
        return [False] * count
    if isinstance(config.get("sliding_window_pattern"), str):
        raise config.error(("layer_types",), "a list, beside a pattern in letters", None)
    period = config.positive_int("sliding_window_pattern", default=4)
    return [(layer + 1) % period != 0 for layer in range(count)]
