"""Command R, Command R7B, and Command with experts.

Source: the configurations published with the models; Cohere, "Command A" (2025), section 2.1.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import experts_spec, read_sparse_layers
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.feed_forward import ExpertsSpec, MLPSpec
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import NormSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    read_layer_windows,
    rms_norm_spec,
    with_head_norms,
)


def build_cohere_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Command R: parallel layers with one norm each, scaled logits."""
    config.set_defaults(rope_theta=500_000.0)
    attention = _attention(config)
    if config.boolean("use_qk_norm"):
        attention = with_head_norms(config, attention, norm=_norm)
        attention = replace(attention, has_norm_per_head=True)
    return _model(config, [attention] * config.positive_int("num_hidden_layers"))


def build_cohere2_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Command R7B: sliding windows, full attention in every fourth layer.

    Layers with full attention have no position embedding.
    """
    config.set_defaults(sliding_window=4096)
    attention = _attention(config)
    pattern = config.positive_int("sliding_window_pattern", "_sliding_window_pattern", default=4)
    config.require_value("use_qk_norm", False)
    config.require_value("order_of_interleaved_layers", "local_attn_first")
    config.require_value("position_embedding_type", "rope_gptj")
    config.require_value("rotary_pct", 1)
    config.require_value("layer_switch", pattern)
    for name in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block"):
        config.require_value(name, True)
    # Distribution of the embedding, and caching in transformers.
    config.ignore("use_parallel_embedding", "cache_implementation")
    count = config.positive_int("num_hidden_layers")
    slides = [(layer + 1) % pattern != 0 for layer in range(count)]
    windows = read_layer_windows(config, slides, required=True)
    everywhere = replace(attention, rope=None)
    return _model(
        config,
        [everywhere if window is None else replace(attention, window=window) for window in windows],
    )


def build_cohere2_moe_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Command with experts: that of Command R7B, with dense first layers."""
    config.set_defaults(head_dim=128, sliding_window=4096)
    attention = _attention(config)
    count = config.positive_int("num_hidden_layers")
    prefix = config.positive_int("prefix_dense_sliding_window_pattern", default=1)
    pattern = config.positive_int("sliding_window_pattern", default=4)
    num_dense = min(config.non_negative_int("first_k_dense_replace", default=0), count)
    periods = [(layer, prefix) for layer in range(num_dense)]
    periods += [(layer, pattern) for layer in range(count - num_dense)]
    slides = [(layer + 1) % period != 0 for layer, period in periods]
    windows = read_layer_windows(config, slides, required=True)
    attentions, mlps = [], []
    size = config.positive_int(
        "prefix_dense_intermediate_size", default=config.positive_int("intermediate_size")
    )
    dense, experts = gated_mlp_spec(config, intermediate_size=size), _experts(config)
    for window, is_sparse in zip(windows, read_sparse_layers(config), strict=True):
        is_rotated = window is not None or (not is_sparse and prefix == 1)
        rope = attention.rope if is_rotated else None
        attentions.append(replace(attention, window=window, rope=rope))
        mlps.append(experts if is_sparse else dense)
    has_rms = config.has("rms_norm_eps")
    # Of LayerNorm.
    config.ignore("layer_norm_eps")
    return _model(config, attentions, mlps, rms_norm_spec if has_rms else _norm)


def _experts(config: ConfigReader) -> ExpertsSpec:
    scorings = {"softmax": "softmax", "sigmoid": "sigmoid"}
    scoring = config.choice("expert_selection_fn", scorings, "softmax")
    num_shared = config.non_negative_int("num_shared_experts", default=0)
    strategies = {"average": 0.5, "sum": 1.0}
    share = config.choice("shared_expert_combination_strategy", strategies, "average")
    shared = None
    if num_shared:
        size = config.positive_int("intermediate_size") * num_shared
        shared = replace(gated_mlp_spec(config, "mlp.shared_experts", size), output_scale=share)
    is_normalized = config.boolean("norm_topk_prob", default=True)
    return experts_spec(
        config,
        "mlp.gate",
        gated_mlp_spec(config, "mlp.experts.{}"),
        defaults=(8, 2),
        scoring=scoring,
        renormalize=scoring == "softmax" or is_normalized,
        scaling_factor=share if num_shared else 1.0,
        shared_expert=shared,
    )


def _attention(config: ConfigReader) -> AttentionSpec:
    bias = config.boolean("attention_bias")
    return attention_spec(config, {"interleaved": True}, bias, bias)


def _model(
    config: ConfigReader,
    attentions: list[AttentionSpec],
    mlps: Sequence[MLPSpec | ExpertsSpec] | None = None,
    build_norm: Callable[[ConfigReader, str], NormSpec] | None = None,
) -> ModelSpec:
    """Build the model; its layers have an MLP unless `mlps` has a block for each."""
    blocks = mlps or [gated_mlp_spec(config)] * len(attentions)
    build_norm = build_norm or _norm
    norm = build_norm(config, "input_layernorm")
    layers = [
        LayerSpec(attention, block, norm, None, is_parallel=True)
        for attention, block in zip(attentions, blocks, strict=True)
    ]
    # Rotary positions support more than max_position_embeddings.
    longest = config.positive_int("model_max_length", "max_position_embeddings")
    return decoder_model(
        config,
        layers,
        tied=True,
        norm=build_norm(config, "model.norm"),
        context_length=longest,
        head={"scale": config.positive_float("logit_scale", default=0.0625)},
    )


def _norm(config: ConfigReader, name: str) -> NormSpec:
    return NormSpec(name, "layer", config.positive_float("layer_norm_eps", default=1e-5))
