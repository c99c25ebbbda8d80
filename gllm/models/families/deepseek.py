"""DeepSeek MoE (V1), V2 and V3, R1 among them.

Source: Dai et al., "DeepSeekMoE" (2024), section 3; DeepSeek-AI, "DeepSeek-V2" (2024), section 2;
"DeepSeek-V3 Technical Report" (2024), section 2.1.
"""

import math
from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.rope import read_rope
from gllm.models.spec import (
    AttentionSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    LinearSpec,
    ModelSpec,
)
from gllm.models.spec_builders import (
    attention_spec,
    check_experts,
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
    rms_norm_spec,
)


def build_v1_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of DeepSeek MoE: softmax routing, shared experts, Llama's attention."""
    config.require_value("scoring_func", "softmax")
    config.require_value("routed_scaling_factor", 1)
    # With one expert per token its weight is not divided by itself.
    renormalize = (
        config.boolean("norm_topk_prob") and config.positive_int("num_experts_per_tok") > 1
    )
    experts = _experts(config, (1, 1), renormalize=renormalize)
    return _model(config, attention_spec(config), experts)


def build_v2_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of DeepSeek V2: MLA and softmax routing.

    In the larger size, routing is limited to groups of experts.
    """
    config.set_defaults(n_shared_experts=2, q_lora_rank=1536)
    limits = {"greedy": False, "group_limited_greedy": True}
    limited = config.choice("topk_method", limits, "greedy")
    config.require_value("scoring_func", "softmax")
    config.require_value("norm_topk_prob", False)
    groups = config.positive_int("n_group", default=1), config.positive_int("topk_group", default=1)
    experts = _experts(config, groups if limited else (1, 1))
    return _model(config, _latent_attention(config), experts)


def build_v3_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of DeepSeek V3: MLA and sigmoid routing with a correction bias."""
    config.set_defaults(
        first_k_dense_replace=3,
        n_group=8,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_nextn_predict_layers=1,
        q_lora_rank=1536,
        routed_scaling_factor=2.5,
        topk_group=4,
    )
    config.require_value("topk_method", "noaux_tc")
    config.require_value("scoring_func", "sigmoid")
    experts = _experts(
        config,
        (config.positive_int("n_group"), config.positive_int("topk_group")),
        scoring="sigmoid",
        renormalize=config.boolean("norm_topk_prob"),
        group_scoring="best two",
        correction_bias="mlp.gate.e_score_correction_bias",
    )
    further = config.non_negative_int("num_nextn_predict_layers", default=0)
    model = _model(config, _latent_attention(config), experts)
    return replace(model, num_prediction_layers=further)


def _experts(config: ConfigReader, groups: tuple[int, int], **options: object) -> ExpertsSpec:
    inner = config.positive_int("moe_intermediate_size")
    shared = config.non_negative_int("n_shared_experts") if config.has("n_shared_experts") else 0
    experts = ExpertsSpec(
        num_experts=config.positive_int("n_routed_experts", "num_local_experts"),
        top_k=config.positive_int("num_experts_per_tok"),
        router=LinearSpec(("mlp.gate",)),
        expert=gated_mlp_spec(config, "mlp.experts.{}", inner),
        scaling_factor=config.positive_float("routed_scaling_factor", default=1.0),
        num_groups=groups[0],
        top_k_groups=groups[1],
        shared_expert=gated_mlp_spec(config, "mlp.shared_experts", inner * shared)
        if shared
        else None,
        **options,  # type: ignore[arg-type]
    )
    return check_experts(experts)


def _model(
    config: ConfigReader, attention: AttentionSpec | LatentAttentionSpec, experts: ExpertsSpec
) -> ModelSpec:
    config.require_value("moe_layer_freq", 1)
    config.require_value("attention_bias", False)
    config.require_value("mlp_bias", False)
    block = gated_mlp_spec(config)
    first = config.non_negative_int("first_k_dense_replace", default=0)
    layers = [
        pre_norm_layer(config, attention, block if layer < first else experts)
        for layer in range(config.positive_int("num_hidden_layers"))
    ]
    return decoder_model(config, layers)


def _latent_attention(config: ConfigReader) -> LatentAttentionSpec:
    # Heads of keys and values before the compression.
    config.ignore("num_key_value_heads", "head_dim", "qk_head_dim")
    hidden = config.positive_int("hidden_size")
    plain, turned = config.positive_int("qk_nope_head_dim"), config.positive_int("qk_rope_head_dim")
    if turned % 2:
        raise config.error(("qk_rope_head_dim",), "even: pairs are rotated", turned)
    interleaved = config.boolean("rope_interleave", default=True)
    rope = read_rope(config, turned, interleaved=interleaved)
    scale = (plain + turned) ** -0.5
    if rope.parameters.get("mscale_all_dim") and rope.parameters["factor"] > 1:
        # YaRN's temperature, which is part of the scale here.
        stretch = math.log(rope.parameters["factor"])
        scale *= (0.1 * rope.parameters["mscale_all_dim"] * stretch + 1) ** 2
    rank = config.positive_int("q_lora_rank") if config.has("q_lora_rank") else None
    return LatentAttentionSpec(
        num_heads=config.positive_int("num_attention_heads"),
        nope_head_dim=plain,
        value_dim=config.positive_int("v_head_dim"),
        kv_lora_rank=config.positive_int("kv_lora_rank"),
        rope=rope,
        q_proj=LinearSpec(("self_attn.q_b_proj" if rank else "self_attn.q_proj",)),
        q_down_proj=LinearSpec(("self_attn.q_a_proj",)) if rank else None,
        q_norm=rms_norm_spec(config, "self_attn.q_a_layernorm") if rank else None,
        q_input_size=rank or hidden,
        kv_down_proj=LinearSpec(("self_attn.kv_a_proj_with_mqa",)),
        kv_norm=rms_norm_spec(config, "self_attn.kv_a_layernorm"),
        kv_up_proj=LinearSpec(("self_attn.kv_b_proj",)),
        out_proj=LinearSpec(("self_attn.o_proj",)),
        scale=scale,
    )
