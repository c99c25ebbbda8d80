"""DeepSeek V2 and V3, R1 among them.

Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2; "DeepSeek-V3 Technical Report" (2024), section
2.1.
"""

import math
from dataclasses import replace

from gllm.models.describe import check_experts, decoder, gated_mlp, pre_norm, rms_norm
from gllm.models.keys import Keys
from gllm.models.rope import rope_of
from gllm.models.spec import Experts, LatentAttention, Linear, Model


def v2(keys: Keys) -> Model:
    """Experts by a softmax, from the best groups in the larger size."""
    keys.assume(n_shared_experts=2, q_lora_rank=1536)
    limits = {"greedy": False, "group_limited_greedy": True}
    limited = keys.choice("topk_method", limits, "greedy")
    keys.only("scoring_func", "softmax")
    keys.only("norm_topk_prob", False)
    groups = keys.count("n_group", default=1), keys.count("topk_group", default=1)
    experts = _experts(keys, groups if limited else (1, 1))
    return _model(keys, experts)


def v3(keys: Keys) -> Model:
    """Experts by sigmoids, corrected for balance when they are picked."""
    keys.assume(
        first_k_dense_replace=3,
        n_group=8,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_nextn_predict_layers=1,
        q_lora_rank=1536,
        routed_scaling_factor=2.5,
        topk_group=4,
    )
    keys.only("topk_method", "noaux_tc")
    keys.only("scoring_func", "sigmoid")
    experts = _experts(
        keys,
        (keys.count("n_group"), keys.count("topk_group")),
        scores="sigmoid",
        normalize=keys.flag("norm_topk_prob"),
        group_score="best two",
        correction="mlp.gate.e_score_correction_bias",
    )
    further = keys.natural("num_nextn_predict_layers", default=0)
    return replace(_model(keys, experts), prediction_layers=further)


def _experts(keys: Keys, groups: tuple[int, int], **options: object) -> Experts:
    inner = keys.count("moe_intermediate_size")
    shared = keys.natural("n_shared_experts") if keys.has("n_shared_experts") else 0
    experts = Experts(
        count=keys.count("n_routed_experts", "num_local_experts"),
        active=keys.count("num_experts_per_tok"),
        router=Linear(("mlp.gate",)),
        expert=gated_mlp(keys, "mlp.experts.{}", inner),
        scale=keys.positive("routed_scaling_factor", default=1.0),
        groups=groups[0],
        active_groups=groups[1],
        shared=gated_mlp(keys, "mlp.shared_experts", inner * shared) if shared else None,
        **options,  # type: ignore[arg-type]
    )
    return check_experts(experts)


def _model(keys: Keys, experts: Experts) -> Model:
    keys.only("moe_layer_freq", 1)
    keys.only("attention_bias", False)
    keys.only("mlp_bias", False)
    # What these models call heads of keys and values are those before the compression.
    keys.skip("num_key_value_heads", "head_dim", "qk_head_dim")
    attention, block = _attention(keys), gated_mlp(keys)
    first = keys.natural("first_k_dense_replace", default=0)
    layers = [
        pre_norm(keys, attention, block if layer < first else experts)
        for layer in range(keys.count("num_hidden_layers"))
    ]
    return decoder(keys, layers)


def _attention(keys: Keys) -> LatentAttention:
    hidden = keys.count("hidden_size")
    plain, turned = keys.count("qk_nope_head_dim"), keys.count("qk_rope_head_dim")
    if turned % 2:
        raise keys.error(("qk_rope_head_dim",), "even: pairs are rotated", turned)
    interleaved = keys.flag("rope_interleave", default=True)
    rope = rope_of(keys, turned, interleaved=interleaved)
    scale = (plain + turned) ** -0.5
    if rope.parameters.get("mscale_all_dim") and rope.parameters["factor"] > 1:
        # The temperature of YaRN, which here is not part of the rotation.
        stretch = math.log(rope.parameters["factor"])
        scale *= (0.1 * rope.parameters["mscale_all_dim"] * stretch + 1) ** 2
    rank = keys.count("q_lora_rank") if keys.has("q_lora_rank") else None
    return LatentAttention(
        heads=keys.count("num_attention_heads"),
        plain_dim=plain,
        value_dim=keys.count("v_head_dim"),
        rank=keys.count("kv_lora_rank"),
        rope=rope,
        query=Linear(("self_attn.q_b_proj" if rank else "self_attn.q_proj",)),
        query_down=Linear(("self_attn.q_a_proj",)) if rank else None,
        query_norm=rms_norm(keys, "self_attn.q_a_layernorm") if rank else None,
        query_rank=rank or hidden,
        kv_down=Linear(("self_attn.kv_a_proj_with_mqa",)),
        kv_norm=rms_norm(keys, "self_attn.kv_a_layernorm"),
        kv_up=Linear(("self_attn.kv_b_proj",)),
        out=Linear(("self_attn.o_proj",)),
        scale=scale,
    )
