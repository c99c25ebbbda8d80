"""Qwen1.5 MoE, and Qwen2, Qwen2.5 and Qwen3, dense and mixtures of experts.

Source: Yang et al., "Qwen2 Technical Report" (2024), section 2.2.2 for the experts; "Qwen3
Technical Report" (2025).
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.spec import AttentionSpec, ExpertsSpec, LayerSpec, LinearSpec, MLPSpec, ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    check_experts,
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
    read_layer_windows,
    read_sliding_window,
    rms_norm_spec,
    windowed_layers,
)


def build_qwen2_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Qwen2: Llama with biases of the query, key and value projections."""
    attention, mlp = attention_spec(config, qkv_bias=True), gated_mlp_spec(config)
    return decoder_model(config, windowed_layers(config, attention, mlp, _read_windows(config)))


def build_qwen2_moe_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Qwen2 MoE: Qwen2 with experts and a gated shared expert."""
    experts = replace(
        _experts_spec(config, default=60),
        shared_expert=gated_mlp_spec(
            config,
            "mlp.shared_expert",
            config.positive_int("shared_expert_intermediate_size", default=5632),
        ),
        shared_expert_gate=LinearSpec(("mlp.shared_expert_gate",)),
    )
    attention = attention_spec(config, qkv_bias=config.boolean("qkv_bias", default=True))
    return decoder_model(config, _moe_layers(config, attention, experts))


def build_qwen3_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Qwen3: norms of query and key heads instead of biases."""
    config.set_defaults(head_dim=128)
    attention, mlp = _qwen3_attention_spec(config), gated_mlp_spec(config)
    return decoder_model(config, windowed_layers(config, attention, mlp, _read_windows(config)))


def build_qwen3_moe_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Qwen3 MoE: Qwen3 with experts, without a shared expert."""
    config.set_defaults(num_key_value_heads=4)
    experts = _experts_spec(config, default=128)
    return decoder_model(config, _moe_layers(config, _qwen3_attention_spec(config), experts))


def _qwen3_attention_spec(config: ConfigReader) -> AttentionSpec:
    """Build attention with norms of query and key heads."""
    config.require_value("use_qk_norm", True)
    bias = config.boolean("attention_bias")
    return replace(
        attention_spec(config, qkv_bias=bias, out_bias=bias),
        query_norm=rms_norm_spec(config, "self_attn.q_norm"),
        key_norm=rms_norm_spec(config, "self_attn.k_norm"),
    )


def _experts_spec(config: ConfigReader, default: int) -> ExpertsSpec:
    """Build the routed experts; `default` is their number without the key."""
    return check_experts(
        ExpertsSpec(
            num_experts=config.positive_int("num_experts", "num_local_experts", default=default),
            top_k=config.positive_int("num_experts_per_tok"),
            router=LinearSpec(("mlp.gate",)),
            expert=gated_mlp_spec(
                config, "mlp.experts.{}", config.positive_int("moe_intermediate_size")
            ),
            renormalize=config.boolean("norm_topk_prob"),
        )
    )


def _moe_layers(
    config: ConfigReader, attention: AttentionSpec, experts: ExpertsSpec
) -> list[LayerSpec]:
    """Build the layers: experts in every decoder_sparse_step-th one, except mlp_only_layers."""
    config.require_value("use_sliding_window", False)
    dense = gated_mlp_spec(config)
    step = config.positive_int("decoder_sparse_step", default=1)
    dense_layers = config.get("mlp_only_layers", default=[])
    if not isinstance(dense_layers, list) or not all(type(one) is int for one in dense_layers):
        raise config.error(("mlp_only_layers",), "a list of layers' numbers", dense_layers)
    blocks: list[MLPSpec | ExpertsSpec] = []
    for layer in range(len(_read_windows(config))):
        is_sparse = layer not in dense_layers and (layer + 1) % step == 0
        blocks.append(experts if is_sparse else dense)
    return [pre_norm_layer(config, attention, block) for block in blocks]


def _read_windows(config: ConfigReader) -> list[int | None]:
    """Return the layers' windows: from layer max_window_layers on, if use_sliding_window is set."""
    layers = config.positive_int("num_hidden_layers")
    first = config.non_negative_int("max_window_layers", default=28)
    if not config.boolean("use_sliding_window"):
        read_sliding_window(config)
        config.require_value("layer_types", ["full_attention"] * layers)
        return [None] * layers
    return read_layer_windows(config, [layer >= first for layer in range(layers)])
