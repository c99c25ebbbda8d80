"""AFMoE (Trinity).

Source: Arcee AI, "Trinity" (2025), https://www.arcee.ai/blog/the-trinity-manifesto, and the
configurations published with the models.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import deepseek_experts_spec
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import LinearSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    read_layer_windows,
    rms_norm_spec,
    with_head_norms,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of AFMoE: gated attention, windows, experts with a correction bias.

    Layers with full attention have no positions.
    """
    config.set_defaults(
        head_dim=128,
        moe_intermediate_size=1408,
        num_experts=64,
        num_experts_per_tok=6,
        num_shared_experts=2,
        rms_norm_eps=1e-5,
        sliding_window=1024,
    )
    for name in ("n_group", "num_expert_groups", "num_limited_groups", "topk_group"):
        config.require_value(name, 1)
    config.require_value("route_norm", True)
    config.require_value("score_func", "sigmoid")
    config.ignore("load_balance_coeff", "use_grouped_mm")
    names = ("gate_proj", "q_proj", "k_proj", "v_proj", "o_proj")
    attention = with_head_norms(config, attention_spec(config, names=names))
    attention = replace(attention, has_output_gate=True)
    experts = replace(
        deepseek_experts_spec(
            config,
            (1, 1),
            scoring="sigmoid",
            renormalize=True,
            correction_bias="mlp.expert_bias",
        ),
        router=LinearSpec(("mlp.router.gate",)),
        scaling_factor=config.positive_float("route_scale", default=1.0),
    )
    dense = gated_mlp_spec(config)
    num_dense = config.non_negative_int("num_dense_layers", default=1)
    period = config.positive_int("global_attn_every_n_layers", default=4)
    count = config.positive_int("num_hidden_layers")
    slides = [(layer + 1) % period != 0 for layer in range(count)]
    layers = [
        LayerSpec(
            replace(attention, window=window, rope=None if window is None else attention.rope),
            dense if layer < num_dense else experts,
            attention_norm=rms_norm_spec(config, "input_layernorm"),
            mlp_norm=rms_norm_spec(config, "pre_mlp_layernorm"),
            post_attention_norm=rms_norm_spec(config, "post_attention_layernorm"),
            post_mlp_norm=rms_norm_spec(config, "post_mlp_layernorm"),
        )
        for layer, window in enumerate(read_layer_windows(config, slides, required=True))
    ]
    model = decoder_model(config, layers)
    scale = model.hidden_size**0.5 if config.boolean("mup_enabled") else 1.0
    return replace(model, embedding=replace(model.embedding, scale=scale))
