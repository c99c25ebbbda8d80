"""Gemma 2 and 3, text only.

Source: Gemma Team, "Gemma 2" (2024), section 2; "Gemma 3 Technical Report" (2025), section 2.
"""

from dataclasses import replace
from typing import Any

from gllm.models.describe import (
    attention_of,
    decoder,
    gated_mlp,
    layer_windows,
    rms_norm,
)
from gllm.models.keys import Keys
from gllm.models.rope import rope_of
from gllm.models.spec import Attention, Embedding, Layer, Model, Norm, Rope


def gemma2(keys: Keys) -> Model:
    """Norms before and after each half, capped scores, a window in every other layer."""
    keys.assume(head_dim=256, num_key_value_heads=4, sliding_window=4096)
    softcap = keys.optional_number("attn_logit_softcapping", default=50.0)
    attention = replace(_attention(keys, None), softcap=softcap)
    slides = [layer % 2 == 0 for layer in range(keys.count("num_hidden_layers"))]
    windows = layer_windows(keys, slides, required=True)
    layers = [_layer(keys, replace(attention, window=window)) for window in windows]
    return _model(keys, layers, final_cap=30.0)


def gemma3(keys: Keys) -> Model:
    """Normalised queries and keys; five layers with a window and a rotation of their own, then one
    without."""
    keys.assume(head_dim=256, num_key_value_heads=4, rope_theta=1_000_000.0, sliding_window=4096)
    pattern = keys.count("sliding_window_pattern", "_sliding_window_pattern", default=6)
    keys.only("attn_logit_softcapping", None)
    count = keys.count("num_hidden_layers")
    slides = [(layer + 1) % pattern != 0 for layer in range(count)]
    windows = layer_windows(keys, slides, required=True)
    everywhere = _attention(keys, {"layer_type": "full_attention"})
    everywhere = replace(
        everywhere,
        query_norm=_norm(keys, "self_attn.q_norm"),
        key_norm=_norm(keys, "self_attn.k_norm"),
    )
    nearby = replace(everywhere, rope=_local_rope(keys, everywhere.head_dim))
    layers = [
        _layer(keys, everywhere if window is None else replace(nearby, window=window))
        for window in windows
    ]
    return _model(keys, layers, final_cap=None)


def _local_rope(keys: Keys, head_dim: int) -> Rope:
    """The rotation of layers with a window, which no scaling of older files is meant for."""
    theta = keys.number("rope_local_base_freq", default=10_000.0)
    if theta < 1:
        raise keys.error(("rope_local_base_freq",), "a finite number from 1 on", theta)
    by_type = keys.get("rope_parameters")
    if isinstance(by_type, dict) and "sliding_attention" in by_type:
        return rope_of(keys, head_dim, theta=theta, layer_type="sliding_attention")
    return Rope(head_dim, theta=theta)


def _attention(keys: Keys, rope: dict[str, Any] | None) -> Attention:
    bias = keys.flag("attention_bias")
    attention = attention_of(keys, rope, bias, bias)
    scalar = keys.positive("query_pre_attn_scalar", default=256)
    return replace(attention, scale=scalar**-0.5)


def _layer(keys: Keys, attention: Attention) -> Layer:
    return Layer(
        attention=attention,
        mlp=gated_mlp(keys, activation="hidden_activation", default="gelu_pytorch_tanh"),
        attention_norm=_norm(keys, "input_layernorm"),
        after_attention=_norm(keys, "post_attention_layernorm"),
        mlp_norm=_norm(keys, "pre_feedforward_layernorm"),
        after_mlp=_norm(keys, "post_feedforward_layernorm"),
    )


def _model(keys: Keys, layers: list[Layer], final_cap: float | None) -> Model:
    keys.only("use_bidirectional_attention", False)
    # Older files have the activation under both names; the library follows hidden_activation.
    keys.skip("hidden_act", "cache_implementation")
    keys.only("sliding_window_size", keys.get("sliding_window"))
    scale = keys.count("hidden_size") ** 0.5
    model = decoder(keys, layers, tied=True, norm=_norm(keys, "model.norm"))
    cap = keys.optional_number("final_logit_softcapping", default=final_cap)
    return replace(
        model,
        embedding=Embedding(model.embedding.name, scale=scale),
        head=replace(model.head, softcap=cap),
    )


def _norm(keys: Keys, name: str) -> Norm:
    """Scales are stored as what they are above 1."""
    return rms_norm(keys, name, offset=1.0)
