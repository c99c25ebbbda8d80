"""Hunyuan, dense and with experts, and HY 3.

Source: Tencent Hunyuan Team, "Hunyuan-A13B Technical Report" (2025), section 2; the configuration
published with HY 3.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import experts_spec, read_sparse_layers
from gllm.models.spec.feed_forward import ExpertsSpec, MLPSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
    with_head_norms,
)

UNUSED = (
    "add_classification_head class_num pool_type mask_init_id eod_token_id pad_id "
    "org_vocab_size im_start_id im_end_id im_newline_id image_token_id video_start_id "
    "video_end_id text_start_id text_end_id num_media_embeds vit_type vit_path vit_token "
    "vit_mapping_type vit_input_resolution vit_norm_type vit_patch vit_remove_prenorm "
    "vit_used_rms_norm vit_add_patchemb_bias anyres_pooling_size anyres_vit_max_image_size "
    "anyres_vit_two_views max_image_size min_image_size cat_extra_token skip_cls_token "
    "freeze_vit unpad_fn dense_list cla_share_factor sep_id kv_lora_rank q_lora_rank "
    "qk_rope_head_dim qk_nope_head_dim v_head_dim moe_drop_tokens "
    "moe_random_routing_dropped_token moe_layer_num_skipped group_limited_greedy "
    "use_mixed_mlp_moe use_mla attention_head_dim xdrope_section"
)
"""Keys of tokens, of images and of variants that no text model of this format uses."""


def build_hunyuan_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Hunyuan: Llama with norms of heads after the rotation."""
    return _model(config, gated_mlp_spec(config, bias=config.boolean("mlp_bias")))


def build_hunyuan_moe_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Hunyuan with experts and a shared expert of the same size."""
    size = config.positive_int("intermediate_size")
    config.require_value("norm_topk_prob", True)
    config.require_value("routed_scaling_factor", 1)
    for name, value in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
        if config.has(name):
            config.require_value(name, value, [value] * config.positive_int("num_hidden_layers"))
    config.rename(num_experts_per_tok=("moe_topk", "num_experts_per_tok"))
    experts = experts_spec(
        config,
        "mlp.gate.wg",
        gated_mlp_spec(config, "mlp.experts.{}"),
        defaults=(1, None),
        top_k=config.uniform_int("num_experts_per_tok", default=1),
        renormalize=True,
        shared_expert=gated_mlp_spec(config, "mlp.shared_mlp"),
    )
    return _model(config, experts)


def build_hy3_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of HY 3: Qwen3 with sigmoid routing and a correction bias."""
    config.set_defaults(
        first_k_dense_replace=1,
        head_dim=128,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=11_158_840.0,
    )
    # Precision of a sum, which is float32 here.
    config.ignore("enable_moe_fp32_combine")
    bias = config.boolean("attention_bias")
    attention = with_head_norms(config, attention_spec(config, qkv_bias=bias, out_bias=bias))
    size = config.positive_int("moe_intermediate_size", default=1536)
    shared = size * config.positive_int("num_shared_experts", default=1)
    experts = experts_spec(
        config,
        "mlp.router.gate",
        gated_mlp_spec(config, "mlp.experts.{}", size),
        defaults=(192, 8),
        scoring="sigmoid",
        renormalize=True,
        scaling_factor=config.positive_float("router_scaling_factor", default=2.826),
        correction_bias="mlp.expert_bias",
        shared_expert=gated_mlp_spec(config, "mlp.shared_mlp", shared),
    )
    dense = gated_mlp_spec(config, bias=config.boolean("mlp_bias"))
    is_sparse = read_sparse_layers(config)
    layers = [pre_norm_layer(config, attention, experts if each else dense) for each in is_sparse]
    further = config.non_negative_int("num_nextn_predict_layers", default=1)
    return decoder_model(config, layers, num_prediction_layers=further)


def _model(config: ConfigReader, mlp: MLPSpec | ExpertsSpec) -> ModelSpec:
    config.set_defaults(rms_norm_eps=1e-5)
    config.ignore(*UNUSED.split())
    for name in ("use_qk_norm", "use_rotary_pos_emb"):
        config.require_value(name, True)
    config.require_value("use_cla", False)
    config.require_value("position_embedding_xdrope", False)
    config.require_value("norm_type", "rms")
    bias = config.boolean("attention_bias")
    names = "query_layernorm", "key_layernorm"
    attention = with_head_norms(config, attention_spec(config, qkv_bias=bias, out_bias=bias), names)
    layer = pre_norm_layer(config, replace(attention, norm_follows_rope=True), mlp)
    return decoder_model(config, [layer] * config.positive_int("num_hidden_layers"))
