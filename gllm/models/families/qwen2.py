"""Qwen1.5 MoE, and Qwen2, Qwen2.5 and Qwen3, dense and mixtures of experts.

Source: Yang et al., "Qwen2 Technical Report" (2024), section 2.2.2 for the experts; "Qwen3
Technical Report" (2025).
"""

from dataclasses import replace
from typing import Any

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import qwen_experts_spec, sparse_blocks, with_shared_expert
from gllm.models.rope import read_local_rope
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.feed_forward import ExpertsSpec
from gllm.models.spec.model import ModelSpec, PredictionHeadSpec
from gllm.models.spec.parts import LinearSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
    read_layer_windows,
    read_sliding_window,
    rms_norm_spec,
    windowed_layers,
    with_head_norms,
)


def build_qwen2_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Qwen2: Llama with biases of the query, key and value projections."""
    attention, mlp = attention_spec(config, qkv_bias=True), gated_mlp_spec(config)
    return decoder_model(config, windowed_layers(config, attention, mlp, _read_windows(config)))


def build_mimo_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of MiMo: Qwen2 with a multi-token prediction head.

    Source: Xiaomi LLM-Core Team, "MiMo: Unlocking the Reasoning Potential of Language Model"
    (2025), section 2.3.
    """
    config.set_defaults(attention_bias=True)
    config.require_value("attention_bias", True)
    further = config.non_negative_int("num_nextn_predict_layers", default=0)
    model = build_qwen2_spec(config)
    # Numbered from the model's last layer on, as those of other families.
    renamed = tuple(
        (f"model.mtp_layers.{index}.", f"model.layers.{model.num_layers + index}.")
        for index in range(further)
    )
    head = PredictionHeadSpec(
        model.hidden_size,
        model.layers[-1],
        embedding_norm=rms_norm_spec(config, "token_layernorm"),
        hidden_norm=rms_norm_spec(config, "hidden_layernorm"),
        projection=LinearSpec(("input_proj",)),
        norm=rms_norm_spec(config, "final_layernorm"),
        is_hidden_first=True,
    )
    return replace(
        model,
        ignored_tensors=(r"model\.mtp_layers\..*",),
        renamed_tensors=renamed,
        num_prediction_layers=further,
        prediction_head=head if further else None,
    )


def build_qwen2_moe_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Qwen2 MoE: Qwen2 with experts and a gated shared expert."""
    experts = with_shared_expert(config, qwen_experts_spec(config, default=60), default=5632)
    attention = attention_spec(config, qkv_bias=config.boolean("qkv_bias", default=True))
    return _moe_model(config, attention, experts)


def build_qwen3_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Qwen3: norms of query and key heads instead of biases."""
    config.set_defaults(head_dim=128)
    attention, mlp = _qwen3_attention_spec(config), gated_mlp_spec(config)
    return decoder_model(config, windowed_layers(config, attention, mlp, _read_windows(config)))


def build_qwen3_moe_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Qwen3 MoE: Qwen3 with experts, without a shared expert."""
    config.set_defaults(num_key_value_heads=4)
    experts = qwen_experts_spec(config, default=128)
    return _moe_model(config, _qwen3_attention_spec(config), experts)


def build_mellum_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Mellum 2: Qwen3 MoE, where layers with a window rotate otherwise.

    Source: the configuration published with the model (JetBrains, 2026).
    """
    config.set_defaults(head_dim=128, norm_topk_prob=True, num_key_value_heads=4, rope_theta=5e5)
    config.ignore("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types")
    config.ignore("mtp_mlp_layer_types", "intermediate_size")
    count = config.positive_int("num_hidden_layers")
    config.require_value("mlp_layer_types", ["sparse"] * count)
    experts = qwen_experts_spec(config, default=64)
    attention = _qwen3_attention_spec(config, {"layer_type": "full_attention"})
    local = read_local_rope(config, attention.head_dim, 10_000.0)
    windows = read_layer_windows(config, [False] * count)
    layers = windowed_layers(config, attention, experts, windows, local)
    return decoder_model(config, layers, ignored_tensors=(r"mtp\..*",))


def _qwen3_attention_spec(
    config: ConfigReader, rope: dict[str, Any] | None = None
) -> AttentionSpec:
    """Build attention with norms of query and key heads."""
    config.require_value("use_qk_norm", True)
    bias = config.boolean("attention_bias")
    return with_head_norms(config, attention_spec(config, rope, bias, bias))


def _moe_model(config: ConfigReader, attention: AttentionSpec, experts: ExpertsSpec) -> ModelSpec:
    config.require_value("use_sliding_window", False)
    blocks = sparse_blocks(config, experts, len(_read_windows(config)))
    return decoder_model(config, [pre_norm_layer(config, attention, block) for block in blocks])


def _read_windows(config: ConfigReader) -> list[int | None]:
    """Return the layers' windows: from layer max_window_layers on, if use_sliding_window is set."""
    layers = config.positive_int("num_hidden_layers")
    first = config.non_negative_int("max_window_layers", default=28)
    if not config.boolean("use_sliding_window"):
        read_sliding_window(config)
        config.require_value("layer_types", ["full_attention"] * layers)
        return [None] * layers
    return read_layer_windows(config, [layer >= first for layer in range(layers)])
