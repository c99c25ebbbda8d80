"""Gemma, Gemma 2 and 3, text only, and EmbeddingGemma.

Source: Gemma Team, "Gemma" (2024), section 2; "Gemma 2" (2024), section 2; "Gemma 3 Technical
Report" (2025), section 2; "EmbeddingGemma" (2025), section 2.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from gllm.kernels.attention_window import SymmetricWindow
from gllm.models.config_reader import ConfigReader
from gllm.models.rope import read_local_rope
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.feed_forward import MLPSpec
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import (
    ACTIVATIONS,
    attention_spec,
    decoder_model,
    four_norm_layer,
    gated_mlp_spec,
    offset_norm_spec,
    pre_norm_layer,
    read_layer_windows,
    windowed_layers,
    with_head_norms,
)


def build_gemma_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Gemma: Llama with larger heads, GELU and a scaled embedding."""
    config.require_value("use_bidirectional_attention", False)
    config.set_defaults(head_dim=256)
    bias = config.boolean("attention_bias")
    # The official releases say "gelu" and mean its approximation; so does transformers.
    activation = config.choice("hidden_act", ACTIVATIONS | {"gelu": "gelu_tanh"}, "gelu")
    config.require_value("hidden_activation", config.get("hidden_act"), "gelu_pytorch_tanh")
    mlp = replace(gated_mlp_spec(config), activation=activation)
    attention = attention_spec(config, None, bias, bias)
    layer = pre_norm_layer(config, attention, mlp, offset_norm_spec)
    return _model(config, [layer] * config.positive_int("num_hidden_layers"))


def build_gemma2_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Gemma 2: norms before and after each block, soft caps, windows.

    Every other layer has a sliding window.
    """
    return _gemma2_model(config, partial(four_norm_layer, norm=offset_norm_spec))


def build_vault_gemma_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of VaultGemma: Gemma 2 without norms after the blocks.

    Source: VaultGemma Team, "VaultGemma" (2025), section 4.
    """
    names = "input_layernorm", "pre_feedforward_layernorm"
    return _gemma2_model(config, partial(pre_norm_layer, norm=offset_norm_spec, names=names))


def build_gemma3_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Gemma 3: query and key norms; full attention in every sixth layer.

    Layers with a sliding window have their own rotary parameters. EmbeddingGemma has no causal
    mask, and half of the window on each side.
    """
    config.set_defaults(head_dim=256, num_key_value_heads=4, rope_theta=1e6, sliding_window=4096)
    config.require_value("attn_logit_softcapping", None)
    pattern = config.positive_int("sliding_window_pattern", "_sliding_window_pattern", default=6)
    count = config.positive_int("num_hidden_layers")
    windows = read_layer_windows(
        config, [(layer + 1) % pattern != 0 for layer in range(count)], required=True
    )
    attention = _attention(config, {"layer_type": "full_attention"})
    attention = with_head_norms(config, attention, norm=offset_norm_spec)
    local = read_local_rope(config, attention.head_dim, 10_000.0, "rope_local_base_freq")
    layer = partial(four_norm_layer, norm=offset_norm_spec)
    layers = windowed_layers(config, attention, _mlp(config), windows, local, layer)
    if config.boolean("use_bidirectional_attention"):
        layers = [_without_causal_mask(one) for one in layers]
    return _capped_model(config, layers, default=None)


def _without_causal_mask(layer: LayerSpec) -> LayerSpec:
    """Return a layer whose tokens see those behind them too."""
    attention = layer.attention
    assert isinstance(attention, AttentionSpec), "layers of Gemma 3 have attention"
    window = attention.window
    assert window is None or isinstance(window, int), "layers of Gemma 3 have no chunks"
    size = None if window is None else window // 2 + 1
    return replace(layer, attention=replace(attention, window=SymmetricWindow(size)))


def _gemma2_model(
    config: ConfigReader, layer: Callable[[ConfigReader, Any, Any], LayerSpec]
) -> ModelSpec:
    config.require_value("use_bidirectional_attention", False)
    config.set_defaults(head_dim=256, num_key_value_heads=4, sliding_window=4096)
    softcap = config.optional_positive_float("attn_logit_softcapping", default=50.0)
    attention = replace(_attention(config, None), softcap=softcap)
    slides = [layer % 2 == 0 for layer in range(config.positive_int("num_hidden_layers"))]
    windows = read_layer_windows(config, slides, required=True)
    layers = windowed_layers(config, attention, _mlp(config), windows, layer=layer)
    return _capped_model(config, layers, default=30.0)


def _attention(config: ConfigReader, rope: dict[str, Any] | None) -> AttentionSpec:
    bias = config.boolean("attention_bias")
    attention = attention_spec(config, rope, bias, bias)
    scalar = config.positive_float("query_pre_attn_scalar", default=256)
    return replace(attention, scale=scalar**-0.5)


def _mlp(config: ConfigReader) -> MLPSpec:
    return gated_mlp_spec(config, activation="hidden_activation", default="gelu_pytorch_tanh")


def _capped_model(
    config: ConfigReader, layers: list[LayerSpec], default: float | None
) -> ModelSpec:
    """Build a model with a cap of the logits, and check the further keys of Gemma 2 and 3."""
    # Older files have both keys; transformers reads hidden_activation.
    config.ignore("hidden_act", "cache_implementation")
    config.require_value("sliding_window_size", config.get("sliding_window"))
    cap = config.optional_positive_float("final_logit_softcapping", default=default)
    return _model(config, layers, softcap=cap)


def _model(config: ConfigReader, layers: list[LayerSpec], **head: Any) -> ModelSpec:
    return decoder_model(
        config,
        layers,
        tied=True,
        embedding_scale=config.positive_int("hidden_size") ** 0.5,
        norm=offset_norm_spec(config, "model.norm"),
        # Gemma 3 states the context that its linear scaling has extended.
        context_length=config.positive_int("max_position_embeddings"),
        head=head,
    )
