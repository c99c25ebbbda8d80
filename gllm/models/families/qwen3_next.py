"""Qwen3-Next and Qwen3.5: gated delta nets, and gated attention in every fourth layer.

Source: Qwen Team, "Qwen3-Next" (2025), and the configurations published with the models; Yang et
al., "Gated Delta Networks" (2024).
"""

from collections.abc import Sequence
from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import qwen_experts_spec, sparse_blocks, with_shared_expert
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.feed_forward import ExpertsSpec, MLPSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import LinearSpec
from gllm.models.spec.recurrent import ConvSpec, DeltaNetSpec, HeadVectorSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    offset_norm_spec,
    pre_norm_layer,
    read_layer_types,
    rms_norm_spec,
    with_head_norms,
)


def build_qwen3_next_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Qwen3-Next: a mixture of experts with a shared one."""
    config.set_defaults(norm_topk_prob=True, num_experts_per_tok=10, moe_intermediate_size=512)
    layers = config.positive_int("num_hidden_layers")
    experts = with_shared_expert(config, qwen_experts_spec(config, default=512), default=512)
    delta_net = replace(
        _delta_net_spec(config, ("in_proj_qkvz",), ("in_proj_ba",)), is_grouped_by_key_head=True
    )
    return _hybrid_model(config, delta_net, sparse_blocks(config, experts, layers))


def build_qwen3_5_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Qwen3.5: Qwen3-Next with an MLP and separate projections."""
    layers = config.positive_int("num_hidden_layers")
    return _hybrid_model(
        config, _separate_delta_net_spec(config), [gated_mlp_spec(config)] * layers
    )


def build_qwen3_5_moe_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Qwen3.5 MoE: Qwen3.5 with experts and a shared one in every layer."""
    config.set_defaults(num_experts_per_tok=8, moe_intermediate_size=512)
    layers = config.positive_int("num_hidden_layers")
    experts = replace(qwen_experts_spec(config, default=256), renormalize=True)
    experts = with_shared_expert(config, experts, default=512)
    config.ignore("intermediate_size")
    return _hybrid_model(config, _separate_delta_net_spec(config), [experts] * layers)


def _separate_delta_net_spec(config: ConfigReader) -> DeltaNetSpec:
    """Build a gated delta net whose projections are stored part by part."""
    return _delta_net_spec(config, ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))


def _delta_net_spec(
    config: ConfigReader, in_names: Sequence[str], gate_names: Sequence[str]
) -> DeltaNetSpec:
    """Build a gated delta net; the names are those of its projections."""
    prefix = "linear_attn"
    heads = config.positive_int("linear_num_value_heads", default=32)
    key_heads = config.positive_int("linear_num_key_heads", default=16)
    if heads % key_heads:
        rule = f"a multiple of linear_num_key_heads {key_heads}"
        raise config.error(("linear_num_value_heads",), rule, heads)
    config.require_value("hidden_act", "silu")
    return DeltaNetSpec(
        num_heads=heads,
        num_key_heads=key_heads,
        key_dim=config.positive_int("linear_key_head_dim", default=128),
        value_dim=config.positive_int("linear_value_head_dim", default=128),
        in_proj=LinearSpec(tuple(f"{prefix}.{name}" for name in in_names)),
        gate_proj=LinearSpec(tuple(f"{prefix}.{name}" for name in gate_names)),
        conv=ConvSpec(
            (f"{prefix}.conv1d",), config.positive_int("linear_conv_kernel_dim", default=4)
        ),
        decay=HeadVectorSpec(f"{prefix}.A_log"),
        decay_bias=HeadVectorSpec(f"{prefix}.dt_bias"),
        norm=rms_norm_spec(config, f"{prefix}.norm"),
        out_proj=LinearSpec((f"{prefix}.out_proj",)),
    )


def _attention_spec(config: ConfigReader) -> AttentionSpec:
    """Build attention with norms of query and key heads and a gate of each head's output."""
    config.set_defaults(head_dim=256)
    config.require_value("attn_output_gate", True)
    bias = config.boolean("attention_bias")
    attention = attention_spec(config, {"partial": 0.25}, qkv_bias=bias, out_bias=bias)
    attention = with_head_norms(config, attention, norm=offset_norm_spec)
    return replace(attention, has_output_gate=True)


def _hybrid_model(
    config: ConfigReader, delta_net: DeltaNetSpec, blocks: Sequence[MLPSpec | ExpertsSpec]
) -> ModelSpec:
    """Build the layers: full attention as layer_types says, or every full_attention_interval."""
    config.ignore("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    interval = config.positive_int("full_attention_interval", default=4)
    names = "linear_attention", "full_attention"
    default = [names[(layer + 1) % interval == 0] for layer in range(len(blocks))]
    types = read_layer_types(config, names, default)
    mixers = dict(zip(names, (delta_net, _attention_spec(config)), strict=True))
    layers = [
        pre_norm_layer(config, mixers[kind], block, offset_norm_spec)
        for kind, block in zip(types, blocks, strict=True)
    ]
    norm = offset_norm_spec(config, "model.norm")
    return decoder_model(config, layers, norm=norm, ignored_tensors=(r"mtp\..*",))
