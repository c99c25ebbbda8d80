"""Laguna.

Source: Poolside, "Laguna XS.2" (2026), and the configuration published with the model.
"""

from dataclasses import replace
from typing import Any

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import experts_spec, read_sparse_layers
from gllm.models.rope import read_rope
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.feed_forward import ExpertsSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import LinearSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
    read_layer_windows,
    with_head_norms,
)

KINDS = {True: "sliding_attention", False: "full_attention"}
"""Keys of the rotary parameters of layers with a window and of others."""

ROPE: dict[str, dict[str, Any]] = {
    KINDS[False]: {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    KINDS[True]: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}
"""Rotary parameters of files without them."""


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Laguna: gates of heads, windows with their own rope, experts.

    Layers may have different numbers of query heads.
    """
    config.set_defaults(
        first_k_dense_replace=1,
        head_dim=128,
        moe_intermediate_size=512,
        num_key_value_heads=8,
        rope_parameters=ROPE,
        sliding_window=512,
    )
    config.require_value("gating", True, "per-head")
    count = config.positive_int("num_hidden_layers")
    windows = read_layer_windows(config, [False] * count, required=True)
    dense, experts = gated_mlp_spec(config), _experts(config)
    layers = [
        pre_norm_layer(config, attention, experts if is_sparse else dense)
        for attention, is_sparse in zip(
            _attentions(config, windows), read_sparse_layers(config), strict=True
        )
    ]
    return decoder_model(config, layers)


def _attentions(config: ConfigReader, windows: list[int | None]) -> list[AttentionSpec]:
    """Return the attention of each layer."""
    bias = config.boolean("attention_bias")
    usual = [config.positive_int("num_attention_heads")] * len(windows)
    heads = config.get("num_attention_heads_per_layer", default=usual)
    common = attention_spec(config, {"layer_type": KINDS[False], "partial": 1.0}, bias, bias)
    common = replace(
        with_head_norms(config, common),
        gate_proj=LinearSpec(("self_attn.g_proj",)),
        gate_activation="softplus",
    )
    is_list = isinstance(heads, list) and len(heads) == len(windows)
    if not is_list or any(type(n) is not int or n < 1 or n % common.num_kv_heads for n in heads):
        rule = f"a multiple of num_key_value_heads {common.num_kv_heads} for each layer"
        raise config.error(("num_attention_heads_per_layer",), rule, heads)
    local = common.rope
    if any(window is not None for window in windows):
        local = read_rope(config, common.head_dim, partial=1.0, layer_type=KINDS[True])
    return [
        replace(
            common, num_heads=count, window=window, rope=common.rope if window is None else local
        )
        for count, window in zip(heads, windows, strict=True)
    ]


def _experts(config: ConfigReader) -> ExpertsSpec:
    config.require_value("moe_apply_router_weight_on_input", False)
    config.require_value("moe_router_logit_softcapping", 0)
    shared = config.positive_int("shared_expert_intermediate_size", default=512)
    return experts_spec(
        config,
        "mlp.gate",
        gated_mlp_spec(config, "mlp.experts.{}", config.positive_int("moe_intermediate_size")),
        defaults=(256, 8),
        scoring="sigmoid",
        renormalize=True,
        scaling_factor=config.positive_float("moe_routed_scaling_factor", default=1.0),
        correction_bias="mlp.experts.e_score_correction_bias",
        shared_expert=gated_mlp_spec(config, "mlp.shared_expert", shared),
    )
