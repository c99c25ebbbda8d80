"""Mistral and Mixtral.

Source: Jiang et al., "Mistral 7B" (2023); "Mixtral of Experts" (2024).
"""

from gllm.models.config_reader import ConfigReader
from gllm.models.spec import ExpertsSpec, LinearSpec, ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    check_experts,
    gated_mlp_spec,
    sliding_window_model,
)


def build_mistral_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Mistral: Llama, with a sliding window in all layers if it is set."""
    config.set_defaults(num_key_value_heads=8, sliding_window=4096)
    return sliding_window_model(config, attention_spec(config), gated_mlp_spec(config))


def build_mixtral_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Mixtral: Mistral with a mixture of experts instead of the MLP."""
    config.set_defaults(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1_000_000.0)
    attention = attention_spec(config)
    experts = check_experts(
        ExpertsSpec(
            num_experts=config.positive_int("num_local_experts", default=8),
            top_k=config.positive_int("num_experts_per_tok", default=2),
            router=LinearSpec(("block_sparse_moe.gate",)),
            expert=gated_mlp_spec(config, "block_sparse_moe.experts.{}", names=("w1", "w3", "w2")),
            renormalize=True,
        )
    )
    return sliding_window_model(config, attention, experts)
