"""Jamba of AI21: Mamba in most layers, attention without positions in the others, experts.

Source: Lieber et al., "Jamba: A Hybrid Transformer-Mamba Language Model" (2024), section 3, and the
configurations published with the models.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import experts_spec
from gllm.models.families.mamba import mamba1_spec
from gllm.models.spec.feed_forward import ExpertsSpec, MLPSpec
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    rms_norm_spec,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Jamba, whose Mamba blocks normalize dt, B and C."""
    config.set_defaults(num_key_value_heads=8, max_position_embeddings=262_144)
    config.rename(
        state_size="mamba_d_state",
        conv_kernel="mamba_d_conv",
        use_conv_bias="mamba_conv_bias",
        use_bias="mamba_proj_bias",
        time_step_rank="mamba_dt_rank",
    )
    config.ignore("calc_logits_for_entire_prompt", "num_logits_to_keep")
    config.require_value("sliding_window", None)
    inner = config.positive_int("mamba_expand", default=2) * config.positive_int("hidden_size")
    step, key, query = (
        rms_norm_spec(config, f"mamba.{name}_layernorm") for name in ("dt", "b", "c")
    )
    mamba = replace(mamba1_spec(config, "mamba", inner), norms=(step, key, query))
    attention = replace(attention_spec(config), rope=None)
    mlp = gated_mlp_spec(config, "feed_forward")
    # One expert is an MLP.
    block: MLPSpec | ExpertsSpec = mlp
    if config.positive_int("num_experts", default=16) > 1:
        expert = gated_mlp_spec(config, "feed_forward.experts.{}")
        block = experts_spec(config, "feed_forward.router", expert, (16, 2))
    config.ignore("num_experts_per_tok")
    count = config.positive_int("num_hidden_layers")
    attends, has_experts = (
        _read_period(config, name, *default, count)
        for name, default in (("attn", (8, 4)), ("expert", (2, 1)))
    )
    norm = rms_norm_spec(config, "input_layernorm")
    mlp_norm = rms_norm_spec(config, "pre_ff_layernorm")
    layers = [
        LayerSpec(
            attention if attends[i] else mamba, block if has_experts[i] else mlp, norm, mlp_norm
        )
        for i in range(count)
    ]
    return decoder_model(config, layers, norm=rms_norm_spec(config, "model.final_layernorm"))


def _read_period(
    config: ConfigReader, name: str, period: int, offset: int, count: int
) -> list[bool]:
    """Return which of `count` layers are every so many-th from an offset on.

    Args:
        config: the model's configuration.
        name: beginning of the keys.
        period: default of the period.
        offset: default of the offset.
        count: number of layers.
    """
    period = config.positive_int(f"{name}_layer_period", default=period)
    offset = config.non_negative_int(f"{name}_layer_offset", default=offset)
    if offset >= period:
        rule = f"below {name}_layer_period {period}"
        raise config.error((f"{name}_layer_offset",), rule, offset)
    return [layer % period == offset for layer in range(count)]
