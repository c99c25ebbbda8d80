"""Mixtral.

Source: Jiang et al., "Mixtral of Experts" (2024).
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.spec import ExpertsSpec, LinearSpec, ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    check_experts,
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
    read_layer_windows,
    window_notes,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the spec of Mixtral: Mistral with a mixture of experts, two per token."""
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
    windows = read_layer_windows(config, [True] * config.positive_int("num_hidden_layers"))
    layers = [
        pre_norm_layer(config, replace(attention, window=window), experts) for window in windows
    ]
    return decoder_model(config, layers, notes=window_notes(windows))
