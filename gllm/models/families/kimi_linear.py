"""Kimi Linear of Moonshot AI: delta nets with a decay per element of the key, latent attention.

Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025), section 4,
and the configuration published with the model.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import read_sparse_layers, v3_experts_spec
from gllm.models.spec.attention import LatentAttentionSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import LinearSpec
from gllm.models.spec.recurrent import ConvSpec, HeadVectorSpec, KimiDeltaSpec
from gllm.models.spec_builders import (
    decoder_model,
    gated_mlp_spec,
    latent_attention_spec,
    pre_norm_layer,
    read_layer_types,
    rms_norm_spec,
)

TYPES = "linear_attention", "full_attention"
"""Entries of layer_types; the first is Kimi delta attention."""


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Kimi Linear, whose attention has no positions."""
    config.set_defaults(
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=1,
        moe_intermediate_size=1024,
        moe_renormalize=True,
        num_experts=256,
        num_experts_per_token=8,
        num_shared_experts=1,
        routed_scaling_factor=2.446,
        rms_norm_eps=1e-5,
    )
    config.rename(
        n_group="num_expert_group",
        norm_topk_prob="moe_renormalize",
        num_experts_per_tok="num_experts_per_token",
    )
    config.flatten("linear_attn_config")
    config.require_value("moe_router_activation_func", "sigmoid")
    for name in ("mla_use_nope", "use_grouped_topk"):
        config.require_value(name, True)
    experts = replace(
        v3_experts_spec(config),
        expert=gated_mlp_spec(
            config,
            "mlp.experts.{}",
            config.positive_int("moe_intermediate_size"),
            names=("w1", "w3", "w2"),
        ),
    )
    mixers = dict(zip(TYPES, (_delta_spec(config), _attention_spec(config)), strict=True))
    mlp, is_sparse = gated_mlp_spec(config), read_sparse_layers(config)
    types = _read_types(config)
    return decoder_model(
        config,
        [
            pre_norm_layer(config, mixers[kind], experts if sparse else mlp)
            for kind, sparse in zip(types, is_sparse, strict=True)
        ],
        context_length=config.positive_int("model_max_length", default=1_048_576),
        renamed_tensors=((".block_sparse_moe.", ".mlp."),),
    )


def _attention_spec(config: ConfigReader) -> LatentAttentionSpec:
    """Build latent attention without positions, whose inner norms have an epsilon of their own."""
    attention = latent_attention_spec(config)
    query_norm = attention.q_norm and replace(attention.q_norm, eps=1e-6)
    norm = replace(attention.kv_norm, eps=1e-6)
    return replace(attention, rope=None, q_norm=query_norm, kv_norm=norm)


def _delta_spec(config: ConfigReader) -> KimiDeltaSpec:
    """Build Kimi delta attention, whose decay rates have the shape [1, 1, heads, 1]."""
    section = "linear_attn_config"
    delta = kimi_delta_spec(
        config,
        config.positive_int(f"{section}.num_heads", "linear_num_heads", default=32),
        config.positive_int(f"{section}.head_dim", "linear_head_dim", default=128),
        config.positive_int(
            f"{section}.short_conv_kernel_size", "linear_conv_kernel_dim", default=4
        ),
        names=(("b", "f_a", "g_a"), "f_b", "g_b"),
    )
    return replace(delta, decay=replace(delta.decay, dimension=2, num_dimensions=4))


def kimi_delta_spec(
    config: ConfigReader,
    num_heads: int,
    head_dim: int,
    conv_size: int,
    names: tuple[tuple[str, ...], str, str],
) -> KimiDeltaSpec:
    """Build Kimi delta attention.

    Args:
        config: the model's configuration.
        num_heads: number of heads.
        head_dim: elements per query, key and value.
        conv_size: tokens of the convolution.
        names: tensor names, without _proj, of down_proj, decay_proj and gate_proj.
    """
    prefix = "self_attn"
    config.require_value("hidden_act", "silu")

    def linear(*parts: str) -> LinearSpec:
        return LinearSpec(tuple(f"{prefix}.{name}_proj" for name in parts))

    return KimiDeltaSpec(
        num_heads=num_heads,
        head_dim=head_dim,
        qkv_proj=linear("q", "k", "v"),
        down_proj=linear(*names[0]),
        decay_proj=linear(names[1]),
        gate_proj=linear(names[2]),
        conv=ConvSpec(tuple(f"{prefix}.{name}_conv1d" for name in "qkv"), conv_size),
        decay=HeadVectorSpec(f"{prefix}.A_log"),
        decay_bias=HeadVectorSpec(f"{prefix}.dt_bias"),
        norm=rms_norm_spec(config, f"{prefix}.o_norm"),
        out_proj=linear("o"),
    )


def _read_types(config: ConfigReader) -> list[str]:
    """Return the type of each layer: layer_types, or the numbers from 1 on of both kinds."""
    count = config.positive_int("num_hidden_layers")
    default = [TYPES[layer > 0 and layer % 4 == 0] for layer in range(count)]
    keys = "linear_attn_config.kda_layers", "linear_attn_config.full_attn_layers"
    numbers = [config.get(key) for key in keys]
    if None not in numbers:
        named = [list(each) if isinstance(each, list) else [each] for each in numbers]
        if sorted([*named[0], *named[1]], key=str) != sorted(range(1, count + 1), key=str):
            rule = f"two lists with each of the layers 1 to {count} once"
            raise config.error((keys[0],), rule, numbers)
        default = [TYPES[layer + 1 in named[1]] for layer in range(count)]
    return read_layer_types(config, TYPES, default)
