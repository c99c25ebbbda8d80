"""MiMo-V2-Flash.

Source: Xiaomi LLM-Core Team, "MiMo-V2-Flash Technical Report" (2026), section 2.
"""

from dataclasses import replace
from functools import partial

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import read_sparse_layers, v3_experts_spec
from gllm.models.rope import read_rope
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
    read_layer_windows,
    rms_norm_spec,
)


def build_v2_flash_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of MiMo-V2-Flash: windows with sinks and twice the KV heads."""
    config.set_defaults(
        first_k_dense_replace=1,
        head_dim=192,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        norm_topk_prob=True,
        num_experts_per_tok=8,
        num_key_value_heads=4,
        rope_theta=5_000_000.0,
        sliding_window=129,
    )
    config.ignore("attention_chunk_size", "rms_norm_eps")
    eps = "layernorm_epsilon" if config.has("layernorm_epsilon") else "rms_norm_eps"
    norm = partial(rms_norm_spec, eps=eps, default=1e-5)
    config.require_value("n_shared_experts", 0)
    full, sliding = _attentions(config)
    pattern = config.get("hybrid_layer_pattern", default=[])
    slides = [layer > 0 and (layer + 1) % 6 != 0 for layer in range(_count(config))]
    if pattern:
        slides = _check_flags(config, "hybrid_layer_pattern", pattern)
    flags = config.get("moe_layer_freq")
    if isinstance(flags, list):
        # The same in words.
        config.ignore("mlp_layer_types")
    is_sparse = (
        _check_flags(config, "moe_layer_freq", flags)
        if isinstance(flags, list)
        else read_sparse_layers(config)
    )
    windows = read_layer_windows(config, slides, required=True)
    size = config.get("sliding_window_size")
    if size is not None:
        # Tokens before the current one.
        size = config.positive_int("sliding_window_size") + 1
        windows = [None if window is None else size for window in windows]
    dense, experts = gated_mlp_spec(config), v3_experts_spec(config)
    layers = [
        pre_norm_layer(
            config,
            full if window is None else replace(sliding, window=window),
            experts if has_experts else dense,
            norm,
        )
        for window, has_experts in zip(windows, is_sparse, strict=True)
    ]
    return decoder_model(
        config, layers, norm=norm(config, "model.norm"), ignored_tensors=(r"model\.mtp\..*",)
    )


def _attentions(config: ConfigReader) -> tuple[AttentionSpec, AttentionSpec]:
    """Return attention to all tokens and within the window, which has twice the KV heads."""
    everywhere = {"partial": 0.334, "layer_type": "full_attention"}
    full = replace(
        attention_spec(config, everywhere),
        value_dim=config.positive_int("v_head_dim", default=128),
        value_scale=config.positive_float("attention_value_scale", default=0.707)
        if not config.is_null("attention_value_scale")
        else 1.0,
    )
    num_kv_heads = 2 * full.num_kv_heads
    for name, value in (
        ("swa_num_key_value_heads", num_kv_heads),
        ("swa_num_attention_heads", full.num_heads),
        ("swa_head_dim", full.head_dim),
        ("swa_v_head_dim", full.value_dim),
        ("add_full_attention_sink_bias", False),
        ("add_swa_attention_sink_bias", True),
    ):
        config.require_value(name, value)
    if full.num_heads % num_kv_heads:
        rule = f"a multiple of the {num_kv_heads} KV heads of layers with a window"
        raise config.error(("num_attention_heads",), rule, full.num_heads)
    theta = config.finite_float("swa_rope_theta", default=10_000.0)
    rope = read_rope(
        config, full.head_dim, partial=0.334, theta=theta, layer_type="sliding_attention"
    )
    sinks = "self_attn.attention_sink_bias"
    return full, replace(full, num_kv_heads=num_kv_heads, rope=rope, sinks=sinks)


def _count(config: ConfigReader) -> int:
    return config.positive_int("num_hidden_layers")


def _check_flags(config: ConfigReader, name: str, flags: object) -> list[bool]:
    """Return whether each layer's number is 1. Raises ModelError."""
    count = _count(config)
    if (
        not isinstance(flags, list)
        or len(flags) != count
        or not all(flag in (0, 1) for flag in flags)
    ):
        raise config.error((name,), f"a list of {count} numbers 0 or 1", flags)
    return [bool(flag) for flag in flags]
