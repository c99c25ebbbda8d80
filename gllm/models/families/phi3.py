"""Phi-3, Phi-3.5, Phi-4, and Phi-3.5 MoE.

Source: Abdin et al., "Phi-3 Technical Report" (2024).
"""

from dataclasses import replace
from functools import partial

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import experts_spec
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import NormSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    layer_norm_spec,
    pre_norm_layer,
    read_layer_windows,
    sliding_window_model,
    windowed_layers,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Phi-3: Llama with fused projections.

    Some sizes have a sliding window or longrope.
    """
    config.set_defaults(rms_norm_eps=1e-5, original_max_position_embeddings=4096)
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.require_value(name, False)
    for name in ("full_attn_mod", "interpolate_factor"):
        config.require_value(name, 1)
    attention = attention_spec(config, {"partial": 1.0}, names=("qkv_proj", "o_proj"))
    mlp = gated_mlp_spec(config, names=("gate_up_proj", "down_proj"))
    return sliding_window_model(config, attention, mlp)


def build_phi_moe_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Phi-3.5 MoE: LayerNorm, and two experts that a sparse mixer weighs."""
    config.set_defaults(num_key_value_heads=8, rope_theta=1_000_000.0)
    config.ignore("input_jitter_noise", "expert_dropout")
    block = "block_sparse_moe"
    experts = experts_spec(
        config,
        f"{block}.gate",
        gated_mlp_spec(config, f"{block}.experts.{{}}", names=("w1", "w3", "w2")),
        defaults=(16, 2),
        keys=("num_local_experts",),
        scoring="sparse mixer",
        jitter=config.positive_float("router_jitter_noise", default=0.01),
    )
    bias = config.boolean("attention_bias")
    attention = _with_magnitude(config, attention_spec(config, None, bias, bias))
    windows = read_layer_windows(config, [True] * config.positive_int("num_hidden_layers"))
    layer = partial(pre_norm_layer, norm=_layer_norm)
    layers = windowed_layers(config, attention, experts, windows, layer=layer)
    head = {"has_bias": config.boolean("lm_head_bias")}
    return decoder_model(config, layers, norm=_layer_norm(config, "model.norm"), head=head)


def _with_magnitude(config: ConfigReader, attention: AttentionSpec) -> AttentionSpec:
    """Return attention whose longrope has the factor of cos and sin that config.json states."""
    rope = attention.rope
    if rope is None or rope.kind != "longrope":
        return attention
    factors = {rope.parameters.get(f"{kind}_mscale") for kind in ("short", "long")}
    if len(factors) != 1:
        raise config.error(("rope_scaling",), "with equal short_mscale and long_mscale", factors)
    parameters = {**rope.parameters, "attention_factor": factors.pop()}
    return replace(attention, rope=replace(rope, parameters=parameters))


def _layer_norm(config: ConfigReader, name: str) -> NormSpec:
    return layer_norm_spec(config, name, "rms_norm_eps")
