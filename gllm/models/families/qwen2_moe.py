"""Qwen1.5 and Qwen2, mixtures of experts.

Source: Yang et al., "Qwen2 Technical Report" (2024), section 2.2.2.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.families.qwen2 import qwen_windows
from gllm.models.spec import AttentionSpec, ExpertsSpec, LayerSpec, LinearSpec, MLPSpec, ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    check_experts,
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the spec of Qwen2 MoE: experts, and a shared expert with a gate."""
    experts = replace(
        qwen_experts_spec(config, default=60),
        shared_expert=gated_mlp_spec(
            config,
            "mlp.shared_expert",
            config.positive_int("shared_expert_intermediate_size", default=5632),
        ),
        shared_expert_gate=LinearSpec(("mlp.shared_expert_gate",)),
    )
    attention = attention_spec(config, qkv_bias=config.boolean("qkv_bias", default=True))
    return decoder_model(config, moe_layers(config, attention, experts))


def qwen_experts_spec(config: ConfigReader, default: int) -> ExpertsSpec:
    """Build the routed experts; `default` is their number without the key."""
    return check_experts(
        ExpertsSpec(
            num_experts=config.positive_int("num_experts", "num_local_experts", default=default),
            top_k=config.positive_int("num_experts_per_tok"),
            router=LinearSpec(("mlp.gate",)),
            expert=gated_mlp_spec(
                config, "mlp.experts.{}", config.positive_int("moe_intermediate_size")
            ),
            renormalize=config.boolean("norm_topk_prob"),
        )
    )


def moe_layers(
    config: ConfigReader, attention: AttentionSpec, experts: ExpertsSpec
) -> list[LayerSpec]:
    """Build the layers: experts in every decoder_sparse_step-th one, except mlp_only_layers."""
    config.require_value("use_sliding_window", False)
    dense = gated_mlp_spec(config)
    step = config.positive_int("decoder_sparse_step", default=1)
    dense_layers = config.get("mlp_only_layers", default=[])
    if not isinstance(dense_layers, list) or not all(type(one) is int for one in dense_layers):
        raise config.error(("mlp_only_layers",), "a list of layers' numbers", dense_layers)
    blocks: list[MLPSpec | ExpertsSpec] = []
    for layer in range(len(qwen_windows(config))):
        is_sparse = layer not in dense_layers and (layer + 1) % step == 0
        blocks.append(experts if is_sparse else dense)
    return [pre_norm_layer(config, attention, block) for block in blocks]
