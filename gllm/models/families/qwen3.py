"""Qwen3, dense.

Source: Yang et al., "Qwen3 Technical Report" (2025).
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.families.qwen2 import qwen_windows
from gllm.models.spec import AttentionSpec, ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
    rms_norm_spec,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the spec of Qwen3: norms of query and key heads instead of biases."""
    config.set_defaults(head_dim=128)
    attention, mlp = qwen3_attention_spec(config), gated_mlp_spec(config)
    return decoder_model(
        config,
        [
            pre_norm_layer(config, replace(attention, window=window), mlp)
            for window in qwen_windows(config)
        ],
    )


def qwen3_attention_spec(config: ConfigReader) -> AttentionSpec:
    """Build attention with norms of query and key heads, also for Qwen3 MoE."""
    config.require_value("use_qk_norm", True)
    bias = config.boolean("attention_bias")
    return replace(
        attention_spec(config, qkv_bias=bias, out_bias=bias),
        query_norm=rms_norm_spec(config, "self_attn.q_norm"),
        key_norm=rms_norm_spec(config, "self_attn.k_norm"),
    )
