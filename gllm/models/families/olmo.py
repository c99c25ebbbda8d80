"""OLMo, OLMo 2 and 3, OLMoE and FlexOlmo.

Source: Groeneveld et al., "OLMo" (2024), section 2.1; OLMo Team, "2 OLMo 2 Furious" (2024),
section 3.2; "OLMo 3" (2025); Muennighoff et al., "OLMoE" (2024), section 2.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import experts_spec
from gllm.models.rope import read_local_rope
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.feed_forward import ExpertsSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import NormSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    post_norm_layer,
    pre_norm_layer,
    read_layer_windows,
    windowed_layers,
    with_head_norms,
)


def build_olmo_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of OLMo: Llama with norms without weights."""

    def norm(_: ConfigReader, name: str) -> NormSpec:
        return NormSpec(name, "layer", 1e-5, has_weight=False)

    layer = pre_norm_layer(config, _attention(config), gated_mlp_spec(config), norm)
    count = config.positive_int("num_hidden_layers")
    return decoder_model(config, [layer] * count, norm=norm(config, "model.norm"))


def build_olmo2_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of OLMo 2: norms after the blocks, and of all queries and keys."""
    config.set_defaults(rms_norm_eps=1e-5)
    layer = post_norm_layer(config, _normed_attention(config), gated_mlp_spec(config))
    return decoder_model(config, [layer] * config.positive_int("num_hidden_layers"))


def build_olmo3_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of OLMo 3: OLMo 2 with windows, which no scaling of the rope applies to.

    Every fourth layer has full attention.
    """
    config.set_defaults(rms_norm_eps=1e-5, rope_theta=500_000.0, sliding_window=4096)
    attention, mlp = _normed_attention(config, "full_attention"), gated_mlp_spec(config)
    assert attention.rope is not None, "attention_spec reads one"
    local = read_local_rope(config, attention.head_dim, attention.rope.theta)
    slides = [(layer + 1) % 4 != 0 for layer in range(config.positive_int("num_hidden_layers"))]
    windows = read_layer_windows(config, slides, required=True)
    layers = windowed_layers(config, attention, mlp, windows, local, post_norm_layer)
    return decoder_model(config, layers)


def build_olmoe_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of OLMoE: experts in every layer, norms of all queries and keys."""
    config.set_defaults(rms_norm_eps=1e-5)
    layer = pre_norm_layer(config, _normed_attention(config), _experts(config))
    return decoder_model(config, [layer] * config.positive_int("num_hidden_layers"))


def build_flex_olmo_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of FlexOlmo: OLMo 2 with experts.

    Source: Shi et al., "FlexOlmo" (2025), section 3.
    """
    config.set_defaults(rope_theta=500_000.0, num_experts=7, num_experts_per_tok=5)
    layer = post_norm_layer(config, _normed_attention(config), _experts(config))
    return decoder_model(config, [layer] * config.positive_int("num_hidden_layers"))


def _experts(config: ConfigReader) -> ExpertsSpec:
    return experts_spec(
        config,
        "mlp.gate",
        gated_mlp_spec(config, "mlp.experts.{}"),
        defaults=(64, 8),
        renormalize=config.boolean("norm_topk_prob"),
    )


def _normed_attention(config: ConfigReader, layer_type: str | None = None) -> AttentionSpec:
    attention = with_head_norms(config, _attention(config, layer_type))
    return replace(attention, has_projection_norm=True)


def _attention(config: ConfigReader, layer_type: str | None = None) -> AttentionSpec:
    bias = config.boolean("attention_bias")
    attention = attention_spec(config, {"layer_type": layer_type}, bias, bias)
    return replace(attention, qkv_limit=config.optional_positive_float("clip_qkv"))
