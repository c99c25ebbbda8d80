"""Gemma 4, text: dense, with experts beside the MLP, or with per-layer embeddings.

Source: Google, "Gemma 4" (2026), and the configurations published with the models.
"""

from dataclasses import replace
from typing import Any

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import experts_spec
from gllm.models.rope import read_rope
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.feed_forward import ExpertBranchSpec, PerLayerInputSpec
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import ModelSpec, PerLayerEmbeddingSpec
from gllm.models.spec.parts import LinearSpec
from gllm.models.spec_builders import (
    ACTIVATIONS,
    attention_spec,
    decoder_model,
    four_norm_layer,
    gated_mlp_spec,
    read_layer_types,
    rms_norm_spec,
    with_head_norms,
    with_shared_kv,
)

SLIDING, FULL = "sliding_attention", "full_attention"
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
"""Values of absent keys."""
GELU: dict[str, Any] = {"activation": "hidden_activation", "default": "gelu_pytorch_tanh"}
"""Key of the activation, and its default."""


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Gemma 4: larger heads in every sixth layer, which sees all tokens.

    The last layers may read the keys and values of earlier ones.
    """
    config.set_defaults(**DEFAULTS)
    return _build(config)


def build_unified_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Gemma 4 12B: without experts and per-layer embeddings."""
    unified = {"max_position_embeddings": 262_144, "sliding_window": 1024}
    config.set_defaults(**DEFAULTS | unified | {"hidden_size_per_layer_input": 0})
    config.require_value("hidden_size_per_layer_input", 0)
    config.require_value("enable_moe_block", False)
    return _build(config)


def _build(config: ConfigReader) -> ModelSpec:
    # Images attend in both directions; text does not.
    config.require_value("use_bidirectional_attention", "vision", False)
    count = config.positive_int("num_hidden_layers")
    usual = [FULL if (index + 1) % 6 == 0 else SLIDING for index in range(count)]
    types = [*read_layer_types(config, (SLIDING, FULL), usual)[:-1], FULL]
    by_type = {kind: _attention(config, kind, types) for kind in dict.fromkeys(types)}
    attentions = with_shared_kv(config, [by_type[kind] for kind in types], types)
    layers = [_layer(config, attention) for attention in attentions]
    config.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
    # Files have projections of keys and values that these layers do not use.
    unused = [str(index) for index, one in enumerate(attentions) if one.kv_layers_back]
    pattern = rf"model\.layers\.({'|'.join(unused)})\.self_attn\.[kv]_(proj|norm)\..*"
    return decoder_model(
        config,
        layers,
        tied=True,
        embedding_scale=config.positive_int("hidden_size") ** 0.5,
        head={"softcap": config.optional_positive_float("final_logit_softcapping")},
        ignored_tensors=(pattern,) if unused else (),
        per_layer_embedding=_per_layer_embedding(config),
    )


def _attention(config: ConfigReader, kind: str, types: list[str]) -> AttentionSpec:
    """Build the attention of the layers of a kind; `types` are those of all layers."""
    bias = config.boolean("attention_bias")
    shares_projection = kind == FULL and config.boolean("attention_k_eq_v")
    names = "q_proj", "k_proj", "k_proj" if shares_projection else "v_proj", "o_proj"
    rope: dict[str, Any] = {"layer_type": kind, "partial": 1.0}
    common = attention_spec(config, rope, bias, bias, names)
    head_dim, kv_heads = config.positive_int("head_dim"), common.num_kv_heads
    if kind == FULL:
        head_dim, kv_heads = _full_sizes(config, types)
    if common.num_heads % kv_heads:
        rule = f"a divisor of num_attention_heads {common.num_heads}"
        raise config.error(("num_global_key_value_heads", "per_layer_config"), rule, kv_heads)
    no_weight = replace(rms_norm_spec(config, "self_attn.v_norm"), has_weight=False)
    return replace(
        with_head_norms(config, common),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=read_rope(config, head_dim, **rope),
        scale=1.0,
        window=config.positive_int("sliding_window") if kind == SLIDING else None,
        value_norm=no_weight,
    )


def _full_sizes(config: ConfigReader, types: list[str]) -> tuple[int, int]:
    """Return head_dim and KV heads of layers with full attention; newer files list these layers."""
    usual = config.positive_int("global_head_dim"), config.positive_int("num_key_value_heads")
    if config.has("num_global_key_value_heads") and config.boolean("attention_k_eq_v"):
        usual = usual[0], config.positive_int("num_global_key_value_heads")
    listed = config.get("per_layer_config", default={})
    if not listed:
        return usual
    full = [str(index) for index, kind in enumerate(types) if kind == FULL]
    values = list(listed.values()) if isinstance(listed, dict) else []
    names = [str(key).lstrip("0") or "0" for key in listed] if values else []
    is_object = bool(values) and isinstance(values[0], dict)
    if names != full or not is_object or any(value != values[0] for value in values):
        raise config.error(("per_layer_config",), "equal objects for all full layers", listed)
    sizes = ConfigReader(values[0])
    kv_heads = sizes.positive_int("num_key_value_heads", default=usual[1])
    return sizes.positive_int("head_dim", default=usual[0]), kv_heads


def _layer(config: ConfigReader, attention: AttentionSpec) -> LayerSpec:
    is_wide = config.boolean("use_double_wide_mlp") and attention.kv_layers_back
    size = config.positive_int("intermediate_size") * (2 if is_wide else 1)
    layer = four_norm_layer(config, attention, gated_mlp_spec(config, "mlp", size, **GELU))
    experts = _experts(config) if config.boolean("enable_moe_block") else None
    per_layer = _per_layer_input(config)
    return replace(layer, experts=experts, per_layer_input=per_layer, scalar="layer_scalar")


def _experts(config: ConfigReader) -> ExpertBranchSpec:
    config.rename(num_experts_per_tok="top_k_experts")
    size = config.positive_int("moe_intermediate_size")
    experts = experts_spec(
        config,
        "router.proj",
        gated_mlp_spec(config, "experts.{}", size, **GELU),
        keys=("num_experts",),
        renormalize=True,
        router_scale="router.scale",
        expert_scale="router.per_expert_scale",
    )
    return ExpertBranchSpec(
        experts,
        norm=rms_norm_spec(config, "pre_feedforward_layernorm_2"),
        router_norm=replace(rms_norm_spec(config, "router.norm"), has_weight=False),
        post_norm=rms_norm_spec(config, "post_feedforward_layernorm_2"),
        post_mlp_norm=rms_norm_spec(config, "post_feedforward_layernorm_1"),
    )


def _per_layer_input(config: ConfigReader) -> PerLayerInputSpec | None:
    size = config.non_negative_int("hidden_size_per_layer_input")
    if not size:
        return None
    return PerLayerInputSpec(
        size=size,
        activation=config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        gate=LinearSpec(("per_layer_input_gate",)),
        projection=LinearSpec(("per_layer_projection",)),
        norm=rms_norm_spec(config, "post_per_layer_input_norm"),
    )


def _per_layer_embedding(config: ConfigReader) -> PerLayerEmbeddingSpec | None:
    rows = config.positive_int("vocab_size_per_layer_input")
    size = config.non_negative_int("hidden_size_per_layer_input")
    if not size:
        return None
    return PerLayerEmbeddingSpec(
        "model.embed_tokens_per_layer",
        rows,
        size,
        "model.per_layer_model_projection",
        rms_norm_spec(config, "model.per_layer_projection_norm"),
    )
