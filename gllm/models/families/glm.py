"""GLM-4: the first release in Hugging Face's format, that of April 2025, GLM-4.5 to 4.7, GLM-5.

Source: GLM Team, "ChatGLM: A Family of Large Language Models from GLM-130B to GLM-4" (2024);
"GLM-4.5: Agentic, Reasoning, and Coding (ARC) Foundation Models" (2025), section 2.1.
"""

from dataclasses import replace
from typing import Any

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import moe_model, v3_experts_spec
from gllm.models.families.deepseek import sparse_attention_model
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    latent_attention_spec,
    pre_norm_layer,
    rms_norm_spec,
    with_head_norms,
)


def build_glm_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of GLM-4 (2024): interleaved rotary embedding of half of each head."""
    return decoder_model(config, [_layer(config)] * config.positive_int("num_hidden_layers"))


def build_glm4_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of GLM-4 (2025): that of 2024 with norms also after each block."""
    layer = replace(
        _layer(config),
        post_attention_norm=rms_norm_spec(config, "post_self_attn_layernorm"),
        post_mlp_norm=rms_norm_spec(config, "post_mlp_layernorm"),
    )
    further = config.non_negative_int("num_nextn_predict_layers", default=0)
    layers = [layer] * config.positive_int("num_hidden_layers")
    return decoder_model(config, layers, num_prediction_layers=further)


def build_glm4_moe_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of GLM-4.5: half of each head rotated, the experts of DeepSeek V3."""
    config.set_defaults(
        first_k_dense_replace=1,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_experts_per_tok=8,
        num_key_value_heads=8,
        num_nextn_predict_layers=1,
        rms_norm_eps=1e-5,
    )
    bias = config.boolean("attention_bias")
    attention = attention_spec(config, {"partial": 0.5}, qkv_bias=bias)
    if config.boolean("use_qk_norm"):
        attention = with_head_norms(config, attention)
    return moe_model(config, attention, v3_experts_spec(config))


def build_glm4_moe_lite_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of GLM-4.7 Flash: the attention and the experts of DeepSeek V3."""
    config.set_defaults(
        first_k_dense_replace=1,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_nextn_predict_layers=1,
        q_lora_rank=768,
        rms_norm_eps=1e-5,
        routed_scaling_factor=1.8,
    )
    config.require_value("attention_bias", False)
    return moe_model(config, latent_attention_spec(config), v3_experts_spec(config))


def build_glm_dsa_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of GLM-5: that of DeepSeek V3.2; layers may share selected keys."""
    config.set_defaults(
        first_k_dense_replace=3,
        n_shared_experts=1,
        norm_topk_prob=True,
        q_lora_rank=2048,
        rms_norm_eps=1e-5,
        routed_scaling_factor=2.5,
    )
    config.require_value("attention_bias", False)
    model = moe_model(config, latent_attention_spec(config), v3_experts_spec(config))
    has_indexer = _read_indexer_layers(config, model.num_layers)
    return sparse_attention_model(config, model, 32, True, has_indexer)


def _read_indexer_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """Return whether each layer has an indexer: by its type, a pattern, or every n-th layer.

    Source: "IndexCache" (2026), arXiv 2603.12201.
    """
    frequency = config.positive_int("index_topk_freq", default=1)
    offset = config.non_negative_int("index_skip_topk_offset", default=2)
    letters = {"F": "full", "S": "shared"}
    types: Any = [
        letters["S" if max(index - offset + 1, 0) % frequency else "F"]
        for index in range(num_layers)
    ]
    if (pattern := config.get("index_topk_pattern")) is not None:
        types = [letters.get(entry, entry) for entry in pattern]
    types = config.get("indexer_types", default=types)
    is_list = isinstance(types, list) and len(types) == num_layers
    if not is_list or types[0] != "full" or not {*types} <= {"full", "shared"}:
        names = "indexer_types", "index_topk_pattern"
        raise config.error(names, "full or shared for each layer, full for the first", types)
    return [kind == "full" for kind in types]


def build_solar_open_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Solar Open: experts of GLM-4.5 in every layer.

    Source: Upstage, "Solar Open Technical Report" (2026), section 2.
    """
    config.set_defaults(
        head_dim=128,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
    )
    # Of dense layers, which there are none of.
    config.ignore("intermediate_size")
    config.require_value("first_k_dense_replace", 0)
    config.require_value("use_qk_norm", False)
    attention = attention_spec(config, {"partial": 1.0}, config.boolean("attention_bias"))
    layer = pre_norm_layer(config, attention, v3_experts_spec(config))
    return decoder_model(config, [layer] * config.positive_int("num_hidden_layers"))


def _layer(config: ConfigReader) -> LayerSpec:
    config.set_defaults(
        attention_bias=True, head_dim=128, num_key_value_heads=2, rms_norm_eps=1.5625e-7
    )
    rope = {"partial": 0.5, "interleaved": True}
    attention = attention_spec(config, rope, qkv_bias=config.boolean("attention_bias"))
    return pre_norm_layer(
        config, attention, gated_mlp_spec(config, names=("gate_up_proj", "down_proj"))
    )
