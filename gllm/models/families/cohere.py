"""Command R and Command R7B.

Source: the configurations published with the models; Cohere, "Command A" (2025), section 2.1.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    read_layer_windows,
)


def build_cohere_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Command R: parallel layers with one norm each, scaled logits."""
    config.set_defaults(rope_theta=500_000.0)
    attention = _attention(config)
    if config.boolean("use_qk_norm"):
        norms = _norm(config, "self_attn.q_norm"), _norm(config, "self_attn.k_norm")
        attention = replace(
            attention, query_norm=norms[0], key_norm=norms[1], has_norm_per_head=True
        )
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


def _attention(config: ConfigReader) -> AttentionSpec:
    bias = config.boolean("attention_bias")
    return attention_spec(config, {"interleaved": True}, bias, bias)


def _model(config: ConfigReader, attentions: list[AttentionSpec]) -> ModelSpec:
    mlp, norm = gated_mlp_spec(config), _norm(config, "input_layernorm")
    layers = [LayerSpec(attention, mlp, norm, None, is_parallel=True) for attention in attentions]
    # Rotary positions support more than max_position_embeddings.
    longest = config.positive_int("model_max_length", "max_position_embeddings")
    model = decoder_model(
        config, layers, tied=True, norm=_norm(config, "model.norm"), context_length=longest
    )
    scale = config.positive_float("logit_scale", default=0.0625)
    return replace(model, head=replace(model.head, scale=scale))


def _norm(config: ConfigReader, name: str) -> NormSpec:
    return NormSpec(name, "layer", config.positive_float("layer_norm_eps", default=1e-5))
