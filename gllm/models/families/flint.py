"""Flint.

Source: Recursive Superintelligence, "Flint" (2026), and the configuration published with the model.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import qwen_experts_spec, sparse_blocks
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
    read_layer_windows,
    with_head_norms,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Flint: Qwen3 MoE with sinks, windows and an ungated shared expert.

    Layers with full attention have no positions.
    """
    config.set_defaults(
        head_dim=128,
        moe_intermediate_size=512,
        norm_topk_prob=True,
        num_experts_per_tok=6,
        num_key_value_heads=4,
        sliding_window=513,
    )
    count, bias = config.positive_int("num_hidden_layers"), config.boolean("attention_bias")
    attention = with_head_norms(config, attention_spec(config, None, bias, bias))
    attention = replace(attention, sinks="self_attn.softmax_offset")
    shared = config.positive_int("shared_expert_intermediate_size", default=1024)
    experts = replace(
        qwen_experts_spec(config, default=256),
        scoring="sigmoid",
        shared_expert=gated_mlp_spec(config, "mlp.shared_expert", shared),
    )
    full = {0, count - 1, *range(1, count, 4)}
    slides = [layer not in full for layer in range(count)]
    layers = [
        pre_norm_layer(
            config, replace(attention, window=window, rope=attention.rope if window else None), mlp
        )
        for window, mlp in zip(
            read_layer_windows(config, slides, required=True),
            sparse_blocks(config, experts, count, dense_layers=(0, 1)),
            strict=True,
        )
    ]
    return decoder_model(config, layers)
