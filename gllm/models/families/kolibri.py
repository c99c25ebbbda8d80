"""Kolibri 1.

Source: Aleph Alpha, "Kolibri-1" (2026), and the configuration published with the model.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import qwen_experts_spec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
    read_layer_windows,
    rms_norm_spec,
    with_head_norms,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Kolibri 1: norms around the blocks, windows, experts in every layer.

    Layers with full attention have no positions where others have windows.
    """
    config.set_defaults(
        head_dim=128, moe_intermediate_size=512, num_key_value_heads=4, sliding_window=513
    )
    # Of dense layers, which there are none of.
    config.ignore("intermediate_size")
    attention = with_head_norms(config, attention_spec(config))
    shared = config.positive_int("shared_expert_intermediate_size", default=512)
    experts = replace(
        qwen_experts_spec(config, default=384),
        scoring="sigmoid",
        selects_by_logits=True,
        correction_bias="moe.router.expert_bias",
        shared_expert=gated_mlp_spec(config, "mlp.shared_experts", shared),
    )
    count = config.positive_int("num_hidden_layers")
    slides = [(layer + 1) % 5 != 0 for layer in range(count)]
    layers = [
        replace(
            pre_norm_layer(
                config,
                replace(attention, window=window, rope=attention.rope if window else None),
                experts,
            ),
            post_attention_norm=rms_norm_spec(config, "post_attn_norm"),
            post_mlp_norm=rms_norm_spec(config, "post_ffn_norm"),
        )
        for window in read_layer_windows(config, slides, required=True)
    ]
    return decoder_model(config, layers)
