"""Llama 4, text.

Source: Meta, "The Llama 4 herd" (2025), https://ai.meta.com/blog/llama-4-multimodal-intelligence.
"""

from dataclasses import replace

from gllm.kernels.attention_window import AttentionChunk
from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import experts_spec
from gllm.models.spec.feed_forward import ExpertsSpec, ExpertStacksSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import NormSpec, QueryScaleSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
    read_layer_types,
    read_rope_layers,
)

BLOCK = "feed_forward"


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Llama 4: experts that a sigmoid weighs, layers without positions.

    Layers with positions attend within chunks, and the others scale late queries.
    """
    config.set_defaults(
        head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=500_000.0
    )
    config.ignore("for_llm_compressor")
    bias = config.boolean("attention_bias")
    attention = attention_spec(config, {"interleaved": True}, bias, bias)
    unrotated = replace(attention, rope=None, query_scale=_read_query_scale(config))
    if config.boolean("use_qk_norm", default=True):
        eps = config.positive_float("rms_norm_eps")
        norm = NormSpec("qk_norm", "rms", eps, has_weight=False)
        attention = replace(attention, query_norm=norm, key_norm=norm)
    rotates = read_rope_layers(config)
    names = "full_attention", "chunked_attention"
    types = read_layer_types(config, names, [names[is_rotated] for is_rotated in rotates])
    chunk = AttentionChunk(config.positive_int("attention_chunk_size", default=8192))
    step = config.positive_int("interleave_moe_layer_step", default=1)
    usual = [layer for layer in range(len(rotates)) if (layer + 1) % step == 0]
    sparse = config.get("moe_layers", default=usual)
    if not isinstance(sparse, list) or not all(type(layer) is int for layer in sparse):
        raise config.error(("moe_layers",), "a list of layers' indices", sparse)
    size = config.positive_int("intermediate_size_mlp", default=16384)
    dense, experts = gated_mlp_spec(config, BLOCK, size), _experts(config)
    layers = [
        pre_norm_layer(
            config,
            replace(
                attention if is_rotated else unrotated,
                window=chunk if kind == "chunked_attention" else None,
            ),
            experts if layer in sparse else dense,
        )
        for layer, (is_rotated, kind) in enumerate(zip(rotates, types, strict=True))
    ]
    return decoder_model(config, layers)


def _read_query_scale(config: ConfigReader) -> QueryScaleSpec | None:
    """Return the factor of late queries of layers without positions; None without."""
    beta = config.positive_float("attn_scale", default=0.1)
    period = config.positive_int("floor_scale", default=8192)
    # Some files have a 4, which counts as true.
    config.require_value("attn_temperature_tuning", True, False, 4)
    is_scaled = config.get("attn_temperature_tuning", default=True)
    return QueryScaleSpec(beta, period, offset=1) if is_scaled else None


def _experts(config: ConfigReader) -> ExpertsSpec:
    names = f"{BLOCK}.experts.gate_up_proj", f"{BLOCK}.experts.down_proj"
    return experts_spec(
        config,
        f"{BLOCK}.router",
        gated_mlp_spec(config, f"{BLOCK}.experts.{{}}"),
        defaults=(16, 1),
        keys=("num_local_experts",),
        scoring="sigmoid",
        weighs_inputs=True,
        shared_expert=gated_mlp_spec(config, f"{BLOCK}.shared_expert"),
        stacks=ExpertStacksSpec(*names, is_transposed=True),
    )
