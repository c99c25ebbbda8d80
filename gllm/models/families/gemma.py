"""Gemma, Gemma 2 and 3, text only.

Source: Gemma Team, "Gemma" (2024), section 2; "Gemma 2" (2024), section 2; "Gemma 3 Technical
Report" (2025), section 2.
"""

from dataclasses import replace
from typing import Any

from gllm.models.config_reader import ConfigReader
from gllm.models.rope import read_rope
from gllm.models.spec import AttentionSpec, EmbeddingSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec
from gllm.models.spec_builders import (
    ACTIVATIONS,
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    read_layer_windows,
    rms_norm_spec,
)


def build_gemma_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Gemma: Llama with larger heads, GELU and a scaled embedding."""
    config.set_defaults(head_dim=256)
    bias = config.boolean("attention_bias")
    # The official releases say "gelu" and mean its approximation; so does transformers.
    activation = config.choice("hidden_act", ACTIVATIONS | {"gelu": "gelu_tanh"}, "gelu")
    config.require_value("hidden_activation", config.get("hidden_act"), "gelu_pytorch_tanh")
    layer = LayerSpec(
        attention=attention_spec(config, None, bias, bias),
        mlp=replace(gated_mlp_spec(config), activation=activation),
        attention_norm=_norm(config, "input_layernorm"),
        mlp_norm=_norm(config, "post_attention_layernorm"),
    )
    return _model(config, [layer] * config.positive_int("num_hidden_layers"))


def build_gemma2_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Gemma 2: norms before and after each block, soft caps, windows.

    Every other layer has a sliding window.
    """
    config.set_defaults(head_dim=256, num_key_value_heads=4, sliding_window=4096)
    softcap = config.optional_positive_float("attn_logit_softcapping", default=50.0)
    attention = replace(_attention(config, None), softcap=softcap)
    slides = [layer % 2 == 0 for layer in range(config.positive_int("num_hidden_layers"))]
    windows = read_layer_windows(config, slides, required=True)
    layers = [_layer(config, replace(attention, window=window)) for window in windows]
    return _with_cap(config, _model(config, layers), default=30.0)


def build_gemma3_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Gemma 3: query and key norms; full attention in every sixth layer.

    Layers with a sliding window have their own rotary parameters.
    """
    config.set_defaults(
        head_dim=256, num_key_value_heads=4, rope_theta=1_000_000.0, sliding_window=4096
    )
    pattern = config.positive_int("sliding_window_pattern", "_sliding_window_pattern", default=6)
    config.require_value("attn_logit_softcapping", None)
    count = config.positive_int("num_hidden_layers")
    slides = [(layer + 1) % pattern != 0 for layer in range(count)]
    windows = read_layer_windows(config, slides, required=True)
    everywhere = _attention(config, {"layer_type": "full_attention"})
    everywhere = replace(
        everywhere,
        query_norm=_norm(config, "self_attn.q_norm"),
        key_norm=_norm(config, "self_attn.k_norm"),
    )
    nearby = replace(everywhere, rope=_local_rope(config, everywhere.head_dim))
    layers = [
        _layer(config, everywhere if window is None else replace(nearby, window=window))
        for window in windows
    ]
    return _with_cap(config, _model(config, layers), default=None)


def _local_rope(config: ConfigReader, head_dim: int) -> RopeSpec:
    """Return the rotary positions of layers with a window; rope_scaling does not apply to them."""
    theta = config.finite_float("rope_local_base_freq", default=10_000.0)
    if theta < 1:
        raise config.error(("rope_local_base_freq",), "a finite number from 1 on", theta)
    by_type = config.get("rope_parameters")
    if isinstance(by_type, dict) and "sliding_attention" in by_type:
        return read_rope(config, head_dim, theta=theta, layer_type="sliding_attention")
    return RopeSpec(head_dim, theta=theta)


def _attention(config: ConfigReader, rope: dict[str, Any] | None) -> AttentionSpec:
    bias = config.boolean("attention_bias")
    attention = attention_spec(config, rope, bias, bias)
    scalar = config.positive_float("query_pre_attn_scalar", default=256)
    return replace(attention, scale=scalar**-0.5)


def _layer(config: ConfigReader, attention: AttentionSpec) -> LayerSpec:
    return LayerSpec(
        attention=attention,
        mlp=gated_mlp_spec(config, activation="hidden_activation", default="gelu_pytorch_tanh"),
        attention_norm=_norm(config, "input_layernorm"),
        post_attention_norm=_norm(config, "post_attention_layernorm"),
        mlp_norm=_norm(config, "pre_feedforward_layernorm"),
        post_mlp_norm=_norm(config, "post_feedforward_layernorm"),
    )


def _model(config: ConfigReader, layers: list[LayerSpec]) -> ModelSpec:
    config.require_value("use_bidirectional_attention", False)
    scale = config.positive_int("hidden_size") ** 0.5
    # Gemma 3 states the context that its linear scaling has extended.
    longest = config.positive_int("max_position_embeddings")
    norm = _norm(config, "model.norm")
    model = decoder_model(config, layers, tied=True, norm=norm, context_length=longest)
    return replace(model, embedding=EmbeddingSpec(model.embedding.name, scale=scale))


def _with_cap(config: ConfigReader, model: ModelSpec, default: float | None) -> ModelSpec:
    """Add the cap of the logits, and check the further keys of Gemma 2 and 3."""
    # Older files have both keys; transformers reads hidden_activation.
    config.ignore("hidden_act", "cache_implementation")
    config.require_value("sliding_window_size", config.get("sliding_window"))
    cap = config.optional_positive_float("final_logit_softcapping", default=default)
    return replace(model, head=replace(model.head, softcap=cap))


def _norm(config: ConfigReader, name: str) -> NormSpec:
    """Build an RMSNorm; its stored scale is relative to 1."""
    return rms_norm_spec(config, name, offset=1.0)
