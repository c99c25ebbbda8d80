"""Falcon-H1: attention and Mamba 2 side by side in every layer.

Source: Zuo et al., "Falcon-H1: A Family of Hybrid-Head Language Models" (2025), section 2.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader, is_finite
from gllm.models.spec.layer import ParallelMixerSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    mamba2_spec,
    pre_norm_layer,
    rms_norm_spec,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Falcon-H1, whose factors scale the outputs of all projections."""
    config.set_defaults(num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=8192)
    for key in ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"):
        config.require_value(key, False)
    config.ignore("mamba_use_mlp", "mlp_expansion_factor", "num_logits_to_keep")
    heads = config.positive_int("mamba_n_heads", default=128)
    expanded = config.positive_int("mamba_expand", default=2) * config.positive_int("hidden_size")
    inner = (
        expanded
        if config.is_null("mamba_d_ssm")
        else config.positive_int("mamba_d_ssm", default=1024)
    )
    head_dim = config.positive_int_or_auto("mamba_d_head", inner // heads)
    if head_dim * heads != inner:
        rule = f"mamba_d_ssm / mamba_n_heads, {inner} / {heads}"
        raise config.error(("mamba_d_head",), rule, head_dim)
    mamba = mamba2_spec(config, "mamba", heads, head_dim)
    before = config.positive_float("ssm_in_multiplier", default=1.0)
    scales = [before * each for each in _read_factors(config, "ssm_multipliers", 5)]
    mamba = replace(
        mamba,
        norm=mamba.norm if config.boolean("mamba_rms_norm") else None,
        is_gated_first=not config.boolean("mamba_norm_before_gate", default=True),
        scales=None if set(scales) == {1.0} else (*scales,),
    )
    # Without biases, the factor of attention's inputs is one of its scores and of its output.
    before = config.positive_float("attention_in_multiplier", default=1.0)
    attention = attention_spec(config)
    keys = config.positive_float("key_multiplier", default=1.0)
    attention = replace(attention, scale=attention.scale * keys * before**2)
    mixer = ParallelMixerSpec(
        attention,
        mamba,
        config.positive_float("attention_out_multiplier", default=1.0) * before,
        config.positive_float("ssm_out_multiplier", default=1.0),
    )
    gate, down = _read_factors(config, "mlp_multipliers", 2)
    mlp = replace(gated_mlp_spec(config, "feed_forward"), gate_scale=gate, output_scale=down)
    layer = pre_norm_layer(config, mixer, mlp, names=("input_layernorm", "pre_ff_layernorm"))
    return decoder_model(
        config,
        [layer] * config.positive_int("num_hidden_layers"),
        norm=rms_norm_spec(config, "model.final_layernorm"),
        embedding_scale=config.positive_float("embedding_multiplier", default=1.0),
        head={"scale": config.positive_float("lm_head_multiplier", default=1.0)},
    )


def _read_factors(config: ConfigReader, key: str, count: int) -> list[float]:
    """Return a list of `count` factors; 1 if the key is not set."""
    factors = config.get(key, default=[1.0] * count)
    if not isinstance(factors, list) or len(factors) != count or not all(map(is_finite, factors)):
        raise config.error((key,), f"a list of {count} numbers", factors)
    return [float(factor) for factor in factors]
