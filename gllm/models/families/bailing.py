"""Ling 3.0 of Ant Group: delta nets with a bounded decay per element, gated latent attention.

Source: Kimi Team, "Kimi Linear" (2025), section 3, for the delta net; Ling Team, "Ling 3.0" (2026),
and the configuration class of transformers.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import read_sparse_layers, v3_experts_spec
from gllm.models.families.kimi_linear import kimi_delta_spec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import LinearSpec
from gllm.models.spec_builders import (
    decoder_model,
    gated_mlp_spec,
    latent_attention_spec,
    pre_norm_layer,
    read_layer_types,
)

RENAMED = (
    ("word_embeddings.", "embed_tokens."),
    (".attention.", ".self_attn."),
    (".self_attn.dense.", ".self_attn.o_proj."),
    (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
)
"""Parts of tensor names as published, and their usual ones."""


def build_hybrid_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Ling 3.0, whose layers form groups that end with attention."""
    config.set_defaults(
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=2,
        moe_intermediate_size=768,
        moe_renormalize=True,
        num_expert_group=8,
        num_experts=512,
        num_experts_per_token=8,
        num_nextn_predict_layers=1,
        num_shared_experts=1,
        rope_theta=6_000_000.0,
        routed_scaling_factor=2.5,
        topk_group=4,
    )
    config.rename(
        n_group="num_expert_group",
        norm_topk_prob="moe_renormalize",
        num_experts_per_tok="num_experts_per_token",
    )
    config.require_value("attention_bias", False)
    for key in ("n_group", "topk_group"):
        # Null is no number of groups.
        config.positive_int(key)
    config.ignore("mtp_loss_scaling_factor")
    attention = latent_attention_spec(config)
    attention = replace(
        attention,
        gate_proj=LinearSpec(("self_attn.g_proj",)),
        kv_norm=replace(attention.kv_norm, eps=1e-6),
    )
    delta = kimi_delta_spec(
        config,
        config.positive_int("linear_num_heads", "num_attention_heads"),
        config.positive_int("linear_head_dim", "head_dim", default=128),
        config.positive_int("linear_conv_kernel_dim", "short_conv_kernel_size", default=4),
        names=(("b",), "f", "g"),
    )
    if config.boolean("kda_safe_gate", default=True):
        delta = replace(delta, decay_bound=_read_bound(config))
    config.ignore("kda_lower_bound")
    is_sparse = read_sparse_layers(config)
    period = config.positive_int("layer_group_size", default=6)
    names = "linear_attention", "full_attention"
    default = [names[(layer + 1) % period == 0] for layer in range(len(is_sparse))]
    types = read_layer_types(config, names, default)
    mixers = dict(zip(names, (delta, attention), strict=True))
    experts, mlp = v3_experts_spec(config), gated_mlp_spec(config)
    return decoder_model(
        config,
        [
            pre_norm_layer(config, mixers[kind], experts if sparse else mlp)
            for kind, sparse in zip(types, is_sparse, strict=True)
        ],
        num_prediction_layers=config.non_negative_int("num_nextn_predict_layers", default=0),
        context_length=config.positive_int("model_max_length", default=262_144),
        renamed_tensors=RENAMED,
    )


def _read_bound(config: ConfigReader) -> float:
    """Return the bound of the logarithm of decays."""
    bound = config.finite_float("kda_lower_bound", default=-5.0)
    if bound >= 0:
        raise config.error(("kda_lower_bound",), "a negative number", bound)
    return bound
