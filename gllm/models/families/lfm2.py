"""LFM2 and LFM3 of Liquid AI, dense and with experts: short convolutions between attention layers.

Source: Liquid AI, "LFM2 Technical Report" (2025), section 2, and the configurations published with
the models.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import experts_spec
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.feed_forward import ExpertsSpec, MLPSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import LinearSpec
from gllm.models.spec.recurrent import ConvSpec, ShortConvSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
    read_layer_types,
    rms_norm_spec,
    with_head_norms,
)

NAMES = "w1", "w3", "w2"
"""Tensor names of gate, up and down projection."""
TYPES = "conv", "full_attention"
"""Entries of layer_types."""
LFM3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.5,
    },
}
"""Rotary embeddings of LFM3, if its file has none."""


def build_lfm2_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of LFM2."""
    config.set_defaults(intermediate_size=12288)
    layers = config.positive_int("num_hidden_layers")
    size = config.positive_int("block_ff_dim", "intermediate_size")
    if config.boolean("block_auto_adjust_ff_dim", default=True):
        factor = config.optional_positive_float("block_ffn_dim_multiplier", default=1.0)
        multiple = config.positive_int("block_multiple_of", default=256)
        size = 2 * size // 3
        if factor is not None:
            size = -(-int(factor * size) // multiple) * multiple
    # Files have them also where they change nothing.
    config.ignore("block_ffn_dim_multiplier", "block_multiple_of")
    mlp = gated_mlp_spec(config, "feed_forward", size, names=NAMES)
    attends = config.get("full_attn_idxs", default=list(range(layers)))
    if not isinstance(attends, list):
        raise config.error(("full_attn_idxs",), "a list of layers' numbers", attends)
    default = [TYPES[index in attends] for index in range(layers)]
    config.ignore("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale")
    config.ignore("block_use_xavier_init", "conv_dim", "conv_dim_out")
    config.ignore("conv_use_xavier_init", "num_heads", "block_ff_dim", "intermediate_size")
    config.require_value("block_use_swiglu", True)
    config.require_value("use_pos_enc", True)
    return _model(config, [mlp] * layers, default)


def build_lfm2_moe_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of LFM2 MoE: LFM2 with experts after the first layers."""
    config.set_defaults(intermediate_size=7168)
    layers = config.positive_int("num_hidden_layers")
    dense = config.non_negative_int("num_dense_layers", default=2)
    mlp = gated_mlp_spec(config, "feed_forward", names=NAMES)
    inner = config.positive_int("moe_intermediate_size", default=1792)
    has_bias = config.boolean("use_expert_bias", default=True)
    experts = experts_spec(
        config,
        "feed_forward.gate",
        gated_mlp_spec(config, "feed_forward.experts.{}", inner, names=NAMES),
        defaults=(32, 4),
        keys=("num_experts",),
        scoring="sigmoid",
        renormalize=config.boolean("norm_topk_prob", default=True),
        scaling_factor=config.positive_float("routed_scaling_factor", default=1.0),
        correction_bias="feed_forward.expert_bias" if has_bias else None,
    )
    blocks = [mlp if index < dense else experts for index in range(layers)]
    return _model(config, blocks, [TYPES[1]] * layers)


def build_lfm3_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of LFM3: LFM2 with windows, gates of heads and norms after blocks."""
    config.set_defaults(
        head_dim=128,
        intermediate_size=7680,
        max_position_embeddings=128_000,
        num_key_value_heads=4,
        rope_parameters=LFM3_ROPE,
        sliding_window=256,
    )

    norm = partial(rms_norm_spec, eps="norm_eps", default=1e-5)
    window = config.positive_int("sliding_window")
    gate = LinearSpec(("self_attn.gate_proj",))
    mixers: dict[str, AttentionSpec | ShortConvSpec] = {"conv": _conv_spec(config, 7)}
    for kind, size in (("full_attention", None), ("sliding_attention", window)):
        attention = attention_spec(config, {"layer_type": kind, "partial": 1.0})
        mixers[kind] = replace(
            with_head_norms(config, attention, norm=norm),
            gate_proj=gate if config.boolean("use_attention_gate", default=True) else None,
            window=size,
        )
    has_norms = config.boolean("use_sandwich_norm", default=True)
    usual = ["sliding_attention", "conv", "full_attention", "conv"]
    count = config.positive_int("num_hidden_layers")
    default = ["conv", *(usual[layer % 4] for layer in range(1, count))]
    mlp = gated_mlp_spec(config, "feed_forward", names=NAMES)
    after = ("post_operator_norm", "post_ffn_norm") if has_norms else (None, None)
    post_norms = [None if name is None else norm(config, name) for name in after]
    layers = [
        replace(
            pre_norm_layer(config, mixers[kind], mlp, norm, ("operator_norm", "ffn_norm")),
            post_attention_norm=post_norms[0],
            post_mlp_norm=post_norms[1],
        )
        for kind in read_layer_types(config, tuple(mixers), default)
    ]
    return decoder_model(config, layers, tied=True, norm=norm(config, "model.embedding_norm"))


def _conv_spec(config: ConfigReader, length: int) -> ShortConvSpec:
    """Build a gated short convolution; length: tokens if the file has none."""
    bias = config.boolean("conv_bias")
    size = config.positive_int("conv_L_cache", default=length)
    return ShortConvSpec(
        num_channels=config.positive_int("hidden_size"),
        in_proj=LinearSpec(("conv.in_proj",), bias),
        conv=ConvSpec(("conv.conv",), size, bias, activation=None),
        out_proj=LinearSpec(("conv.out_proj",), bias),
    )


def _model(
    config: ConfigReader, blocks: Sequence[MLPSpec | ExpertsSpec], default: Sequence[str]
) -> ModelSpec:
    """Build the model; `default` has the types of the layers if the file has none."""
    config.set_defaults(num_key_value_heads=8, rope_theta=1e6, max_position_embeddings=128_000)
    norm = partial(rms_norm_spec, eps="norm_eps", default=1e-5)
    attention = attention_spec(config, names=("q_proj", "k_proj", "v_proj", "out_proj"))
    attention = with_head_norms(config, attention, ("q_layernorm", "k_layernorm"), norm)
    conv = _conv_spec(config, 3)
    types = read_layer_types(config, TYPES, default)
    mixers, names = dict(zip(TYPES, (conv, attention), strict=True)), ("operator_norm", "ffn_norm")
    layers = [
        pre_norm_layer(config, mixers[kind], block, norm, names)
        for kind, block in zip(types, blocks, strict=True)
    ]
    tied = config.boolean("tie_embedding", "tie_word_embeddings", default=True)
    return decoder_model(config, layers, tied=tied, norm=norm(config, "model.embedding_norm"))
