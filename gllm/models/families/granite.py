"""Granite 3 and 4, HyperCLOVA X, MiniCPM: factors of embedding, scores, blocks and logits.

Source: Granite Team, "Granite 3.0 Language Models" (2024), section 3; NAVER Cloud, "HyperCLOVA X
THINK" (2025), section 2; Hu et al., "MiniCPM" (2024), section 3.
"""

import math
from dataclasses import replace

from gllm.models.config_reader import ConfigReader, is_finite
from gllm.models.expert_builders import experts_spec
from gllm.models.spec.attention import AttentionSpec, LatentAttentionSpec
from gllm.models.spec.feed_forward import ExpertsSpec, ExpertStacksSpec, MLPSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import LinearSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    expanded_mamba2_spec,
    gated_mlp_spec,
    latent_attention_spec,
    pre_norm_layer,
    read_layer_types,
    read_layer_windows,
    rms_norm_spec,
)

HYBRID_TYPES = "linear_attention", "full_attention"
"""Entries of layer_types in Granite 4; the first is Mamba 2."""


def build_granite_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Granite: Llama with factors of its blocks, scores and logits."""
    return _model(config, gated_mlp_spec(config, bias=config.boolean("mlp_bias")))


def build_granite_moe_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Granite with experts, whose weights are stored as one tensor."""
    return _model(config, _experts(config))


def build_granite_moe_shared_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Granite with experts and a shared expert."""
    size = config.non_negative_int("shared_intermediate_size", default=0)
    names = "input_linear", "output_linear"
    shared = gated_mlp_spec(config, "shared_mlp", size, names=names) if size else None
    return _model(config, replace(_experts(config), shared_expert=shared))


def build_granite_swa_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Granite with sinks, windows, and rotary bases that differ by layer."""
    config.set_defaults(
        num_key_value_heads=4, rms_norm_eps=1e-5, sliding_window=128, tie_word_embeddings=True
    )
    return _with_windows(config, build_granite_spec(config))


def build_granite_moe_swa_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Granite MoE with sinks, windows and rotary bases by layer."""
    config.set_defaults(sliding_window=128)
    model = _with_windows(config, build_granite_moe_shared_spec(config))
    block = "block_sparse_moe"
    layers = []
    for layer in model.layers:
        assert isinstance(layer.mlp, ExpertsSpec), "all layers have experts"
        stacks = ExpertStacksSpec(f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj")
        mlp = replace(layer.mlp, router=LinearSpec((f"{block}.router",)), stacks=stacks)
        layers.append(replace(layer, mlp=mlp))
    return replace(model, layers=tuple(layers))


def _with_windows(config: ConfigReader, model: ModelSpec) -> ModelSpec:
    """Add sinks, the windows of three in four layers, and the bases of `layer_rope_theta`."""
    count = model.num_layers
    windows = read_layer_windows(config, [layer % 4 != 0 for layer in range(count)], required=True)
    bases = config.get("layer_rope_theta", default=[None] * count)
    is_list = isinstance(bases, list) and len(bases) == count
    if not is_list or not all(b is None or b == 0 or (is_finite(b) and b >= 1) for b in bases):
        raise config.error(("layer_rope_theta",), f"a list of {count} bases, or 0 for none", bases)
    layers = []
    for layer, window, base in zip(model.layers, windows, bases, strict=True):
        attention = layer.attention
        assert isinstance(attention, AttentionSpec), "the layers of Granite 3 have attention"
        rope = attention.rope
        if base is not None and rope is not None:
            rope = None if base == 0 else replace(rope, theta=float(base))
        attention = replace(attention, rope=rope, window=window, sinks="self_attn.sinks")
        layers.append(replace(layer, attention=attention))
    return replace(model, layers=tuple(layers))


def build_granite_hybrid_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Granite 4: Mamba 2 in most layers, attention without positions."""
    size = config.positive_int("shared_intermediate_size", default=1024)
    shared = gated_mlp_spec(config, "shared_mlp", size, names=("input_linear", "output_linear"))
    mlp: MLPSpec | ExpertsSpec = shared
    num_experts = config.non_negative_int("num_local_experts", default=8)
    if num_experts and config.get("num_experts_per_tok") == 0:
        raise config.error(("num_local_experts",), "0, as num_experts_per_tok is", num_experts)
    if num_experts:
        mlp = replace(_experts(config), shared_expert=shared)
    config.ignore("num_experts_per_tok", "intermediate_size", "init_method")
    config.require_value("normalization_function", "rmsnorm")
    model = _model(config, mlp)
    mamba = expanded_mamba2_spec(config)
    config.require_value("position_embedding_type", "rope", "nope")
    is_rotated = config.get("position_embedding_type") == "rope"
    types = read_layer_types(config, HYBRID_TYPES, [HYBRID_TYPES[0]] * model.num_layers)
    layers = []
    for kind, layer in zip(types, model.layers, strict=True):
        attention = layer.attention
        assert isinstance(attention, AttentionSpec), "the layers of Granite 3 have attention"
        attention = attention if is_rotated else replace(attention, rope=None)
        layers.append(replace(layer, attention=mamba if kind == HYBRID_TYPES[0] else attention))
    return replace(model, layers=tuple(layers))


def build_hyperclovax_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of HyperCLOVA X: Granite with norms also after each block."""
    mlp = gated_mlp_spec(config, bias=config.boolean("mlp_bias"))
    model = _model(config, mlp, usual_scale=None)
    layer = model.layers[0]
    if config.boolean("use_post_norm", default=True):
        norms = rms_norm_spec(config, "post_norm1"), rms_norm_spec(config, "post_norm2")
        layer = replace(layer, post_attention_norm=norms[0], post_mlp_norm=norms[1])
    head = replace(model.head, scale=config.positive_float("logits_scaling", default=1.0))
    return replace(model, layers=(layer,) * model.num_layers, head=head)


def build_minicpm_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of MiniCPM 1, 2 and 4: Llama with factors of embedding and blocks."""
    config.require_value("sparse_config", None)
    return _minicpm_model(config, attention_spec(config))


def build_minicpm3_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of MiniCPM 3: MiniCPM with multi-head latent attention."""
    heads = config.positive_int("num_attention_heads")
    config.set_defaults(
        kv_lora_rank=256,
        q_lora_rank=768,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        rms_norm_eps=1e-5,
        rope_interleave=False,
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=256,
        v_head_dim=config.positive_int("hidden_size") // heads or 1,
    )
    config.require_value("attention_bias", False)
    return _minicpm_model(config, latent_attention_spec(config))


def _minicpm_model(
    config: ConfigReader, attention: AttentionSpec | LatentAttentionSpec
) -> ModelSpec:
    hidden, count = config.positive_int("hidden_size"), config.positive_int("num_hidden_layers")
    # Of speculative decoding.
    config.ignore("mup_denominator")
    depth = config.positive_float("scale_depth", default=math.sqrt(count))
    base = config.positive_int("dim_model_base", default=hidden)
    layer = pre_norm_layer(config, attention, gated_mlp_spec(config))
    layer = replace(layer, residual_scale=depth / math.sqrt(count))
    scale = config.positive_float("scale_emb", default=1.0)
    head = {"scale": base / hidden}
    return decoder_model(config, [layer] * count, tied=True, embedding_scale=scale, head=head)


def _experts(config: ConfigReader) -> ExpertsSpec:
    block = "block_sparse_moe"
    return experts_spec(
        config,
        f"{block}.router.layer",
        gated_mlp_spec(config, f"{block}.experts.{{}}"),
        defaults=(8, 2),
        keys=("num_local_experts",),
        renormalize=True,
        stacks=ExpertStacksSpec(f"{block}.input_linear.weight", f"{block}.output_linear.weight"),
    )


def _model(
    config: ConfigReader, mlp: MLPSpec | ExpertsSpec, usual_scale: float | None = 1.0
) -> ModelSpec:
    """Build the model with its factors.

    usual_scale: factor of the scores without the key; None for that of other models.
    """
    bias = config.boolean("attention_bias")
    attention = attention_spec(config, qkv_bias=bias, out_bias=bias)
    if usual_scale is None or config.is_null("attention_multiplier"):
        usual_scale = attention.scale
    scale = config.positive_float("attention_multiplier", default=usual_scale)
    layer = replace(
        pre_norm_layer(config, replace(attention, scale=scale), mlp),
        residual_scale=config.positive_float("residual_multiplier", default=1.0),
    )
    return decoder_model(
        config,
        [layer] * config.positive_int("num_hidden_layers"),
        embedding_scale=config.positive_float("embedding_multiplier", default=1.0),
        head={"scale": 1 / config.positive_float("logits_scaling", default=1.0)},
    )
