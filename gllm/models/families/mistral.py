"""Mistral, Ministral, Ministral 3, Mixtral and Mistral 4.

Source: Jiang et al., "Mistral 7B" (2023); "Mixtral of Experts" (2024); Mistral AI,
"Ministral 3" (2025).
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import deepseek_experts_spec, experts_spec, moe_model
from gllm.models.rope import read_query_scale
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    gated_mlp_spec,
    latent_attention_spec,
    sliding_window_model,
)

MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Rotary embedding of Ministral 3, if its file has none."""


def build_mistral_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Mistral: Llama, with a sliding window in all layers if it is set."""
    config.set_defaults(num_key_value_heads=8, sliding_window=4096)
    return sliding_window_model(config, attention_spec(config), gated_mlp_spec(config))


def build_ministral_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Ministral (2024): Mistral with windows in some layers."""
    config.set_defaults(num_key_value_heads=8, sliding_window=4096)
    return replace(
        sliding_window_model(config, attention_spec(config), gated_mlp_spec(config)), notes=()
    )


def build_ministral3_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Ministral 3: Mistral whose late queries are scaled by position."""
    config.set_defaults(
        head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-5, rope_parameters=MINISTRAL_ROPE
    )
    rope = {"ignored": ("llama_4_scaling_beta", "max_position_embeddings")}
    return sliding_window_model(config, attention_spec(config, rope), gated_mlp_spec(config))


def build_mixtral_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Mixtral: Mistral with a mixture of experts instead of the MLP."""
    config.set_defaults(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1_000_000.0)
    attention = attention_spec(config)
    experts = experts_spec(
        config,
        "block_sparse_moe.gate",
        gated_mlp_spec(config, "block_sparse_moe.experts.{}", names=("w1", "w3", "w2")),
        defaults=(8, 2),
        keys=("num_local_experts",),
        renormalize=True,
    )
    return sliding_window_model(config, attention, experts)


def build_mistral4_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Mistral 4: MLA with scaled late queries, softmax routing in groups."""
    config.set_defaults(
        kv_lora_rank=256,
        moe_intermediate_size=2048,
        n_routed_experts=128,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_experts_per_tok=4,
        q_lora_rank=1024,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        rope_parameters=MINISTRAL_ROPE
        | {"rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192},
        v_head_dim=128,
    )
    config.require_value("attention_bias", False)
    plain, turned = config.positive_int("qk_nope_head_dim"), config.positive_int("qk_rope_head_dim")
    attention = latent_attention_spec(
        config,
        head_dim=plain + turned,
        partial=turned / (plain + turned),
        ignored=("llama_4_scaling_beta", "max_position_embeddings"),
    )
    attention = replace(attention, query_scale=read_query_scale(config))
    experts = deepseek_experts_spec(
        config,
        (config.positive_int("n_group", default=1), config.positive_int("topk_group", default=1)),
        renormalize=config.boolean("norm_topk_prob"),
        group_scoring="best two",
    )
    return moe_model(config, attention, experts)
