"""Published configurations with small sizes: every key stays, and so do the relations of sizes."""

import copy
from typing import Any

from tests.support.models.published import Config

LAYERS, HEADS, HEAD_DIM, HIDDEN, VOCABULARY, CONTEXT, EXPERTS = 4, 4, 16, 64, 131, 256, 8
SIZES: dict[str, int] = {
    "ffn_dim": 96,
    "ffn_hidden_size": 4 * HIDDEN,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 12,
    "intermediate_size": 96,
    "intermediate_size_mlp": 80,
    "block_ff_dim": 96,
    "block_multiple_of": 16,
    "kv_lora_rank": 16,
    "linear_key_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 10,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_head_dim": 6,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "moe_shared_expert_intermediate_size": 40,
    "ssm_state_size": 11,
    "state_size": 11,
    "max_position_embeddings": CONTEXT,
    "max_sequence_length": CONTEXT,
    "model_max_length": CONTEXT,
    "moe_intermediate_size": 32,
    "d_model": HIDDEN,
    "max_seq_len": CONTEXT,
    "n_ctx": CONTEXT,
    "n_inner": 96,
    "n_embd": HIDDEN,
    "n_embed": HIDDEN,
    "hidden_size": HIDDEN,
    "n_positions": CONTEXT,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "index_topk": 12,
    "seq_length": CONTEXT,
    "shared_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    "v_head_dim": 10,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "word_embed_proj_dim": HIDDEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Sizes that replace published ones, where these are set and not 0."""
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEAD_COUNTS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SELECTED_COUNTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")


def first_of(raw: Config, names: tuple[str, ...]) -> int:
    """Return the value of the first of these keys that is set."""
    return int(next(raw[name] for name in names if raw.get(name) is not None))


def small(published: Config) -> Config:
    """Return a configuration of which a model has some hundred kilobytes."""
    raw = copy.deepcopy(published)
    count = first_of(raw, LAYER_COUNTS)
    num_layers = raw.get("sliding_window_pattern", LAYERS)
    num_layers = num_layers if isinstance(num_layers, int) else LAYERS
    if raw.get("num_kv_shared_layers"):
        # The last layer finds the keys and values of one of its kind.
        num_layers = raw["layer_types"].index("full_attention") + 2
        raw["num_kv_shared_layers"] = 1
    heads = first_of({"n_head": 1} | raw, HEAD_COUNTS)
    head_dim = HEAD_DIM
    if raw.get("head_dim") and not raw.get("kv_lora_rank"):
        wide = raw["head_dim"] * heads != raw.get("hidden_size")
        head_dim = 24 if wide else HEAD_DIM
        if raw.get("rotary_dim"):
            raw["rotary_dim"] = raw["rotary_dim"] * head_dim // raw["head_dim"]
        raw["head_dim"] = head_dim
    elif raw.get("rotary_dim"):
        raw["rotary_dim"] = HEAD_DIM // 2
    if raw.get("kv_lora_rank"):
        whole = (raw.get("qk_nope_head_dim") or 0) + (raw.get("qk_rope_head_dim") or 0)
        sizes = {whole: SIZES["qk_nope_head_dim"] + SIZES["qk_rope_head_dim"]}
        sizes[raw.get("qk_rope_head_dim") or 0] = SIZES["qk_rope_head_dim"]
        for name in ("head_dim", "qk_head_dim"):
            if raw.get(name):
                raw[name] = sizes.get(raw[name], SIZES["qk_rope_head_dim"])
    kept = _kept_layers(raw, count, num_layers)
    for name, value in raw.items():
        if isinstance(value, list) and len(value) == count:
            raw[name] = [value[layer] for layer in kept]
        elif value and name in SIZES:
            raw[name] = SIZES[name]
        elif name in LAYER_COUNTS:
            raw[name] = num_layers
        elif name in HEAD_COUNTS:
            raw[name] = HEADS
        elif value and name in KV_HEAD_COUNTS:
            raw[name] = {heads: HEADS, 1: 1}.get(value, 2)
        elif value and name in EXPERT_COUNTS:
            raw[name] = EXPERTS
        elif name in ("n_group", "num_expert_group", "topk_group") and value and value > 1:
            raw[name] = 2 if name == "topk_group" else 4
    if "mamba_n_heads" in raw and "attention" in published.get("layer_types", []):
        raw["layer_types"][1] = "attention"
    if raw["model_type"] == "bailing_hybrid":
        raw |= {"layer_group_size": 2, "num_nextn_predict_layers": 0}
    if raw["model_type"] in ("mamba", "falcon_mamba"):
        raw |= {"intermediate_size": 2 * HIDDEN, "expand": 2, "time_step_rank": 7}
    if raw["model_type"] == "jamba":
        raw |= {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_dt_rank": 7}
    if raw["model_type"] == "mamba2":
        raw |= {"num_heads": 8, "head_dim": 2 * HIDDEN // 8}
    if raw["model_type"] == "bamba":
        raw |= {"attn_layer_indices": [2], "attn_rotary_emb": HEAD_DIM // 2}
    if "linear_attn_config" in raw:
        layers = {"kda_layers": [1, 2, 4], "full_attn_layers": [3]}
        raw["linear_attn_config"] |= layers | {"head_dim": 12, "num_heads": HEADS}
    pattern = raw.get("hybrid_override_pattern")
    if pattern is not None:
        raw["hybrid_override_pattern"] = "M*EM" if "E" in pattern else "M*-M"
    _shrink_counts(raw, published, count, num_layers)
    share = raw.get("partial_rotary_factor") or 1
    rotated = raw.get("qk_rope_head_dim") or int(head_dim * share)
    _shrink_rope(raw, rotated // 2)
    for name in ("auto_map", "torch_dtype", "dtype"):
        raw.pop(name, None)
    return raw


def _kept_layers(raw: Config, count: int, num_layers: int) -> list[int]:
    """Return the layers that lists of one value per layer are cut to: the first of each kind.

    Where the last layers share keys and values of others, the kinds come twice.
    """
    kinds = raw.get("layer_types") or raw.get("layers_block_type") or [None] * count
    if raw.get("num_kv_shared_layers"):
        raw["num_kv_shared_layers"] = num_layers // 2
        pair = [kinds.index(kind) for kind in sorted(set(kinds))]
        return (pair * num_layers)[:num_layers]
    first = {kinds.index(kind) for kind in set(kinds)}
    others = [layer for layer in range(count) if layer not in first]
    return sorted([*first, *others[: num_layers - len(first)]])


def _shrink_counts(raw: Config, published: Config, count: int, num_layers: int) -> None:
    """Shrink what counts layers, experts or tokens of a window."""
    for name in SELECTED_COUNTS:
        if isinstance(raw.get(name), list):
            raw[name] = [min(each, 2) for each in raw[name]]
        elif raw.get(name):
            raw[name] = min(raw[name], 2)
    if isinstance(raw.get("moe_intermediate_size"), list):
        raw["moe_intermediate_size"] = [raw["intermediate_size"]] * num_layers
    for name in ("first_k_dense_replace", "moe_layer_start_index"):
        if raw.get(name):
            raw[name] = 1
    if raw.get("moe_layer_end_index", -1) != -1:
        raw["moe_layer_end_index"] += num_layers - count
    if raw.get("max_window_layers") is not None:
        raw["max_window_layers"] = 2 if raw["max_window_layers"] < count else num_layers
    longest = published.get("max_position_embeddings", 0)
    if raw.get("sliding_window") and raw["sliding_window"] < longest:
        raw["sliding_window"] = 9
        if "sliding_window_size" in raw:
            raw["sliding_window_size"] = 9
    if raw.get("attention_types"):
        raw["attention_types"] = [[["global", "local"], num_layers // 2]]
    for name in ("swa_head_dim", "swa_v_head_dim", "swa_num_attention_heads"):
        if raw.get(name):
            raw[name] = raw[name.removeprefix("swa_")]
    if raw.get("swa_num_key_value_heads"):
        raw["swa_num_key_value_heads"] = 2 * raw["num_key_value_heads"]
    for name in ("attention_chunk_size", "floor_scale", "window_size"):
        if raw.get(name):
            raw[name] = 9


def _shrink_rope(raw: Config, pairs: int) -> None:
    """Shrink the original context and the lists of factors of a scaled rotary embedding."""
    scaling: dict[str, Any] = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    original = 4 if kind in ("longrope", "su") else 64
    if raw.get("model_type") == "phimoe":
        # transformers has the short factors and the long magnitude for longer sequences.
        original = CONTEXT
    for keys in (raw, scaling):
        if keys.get("original_max_position_embeddings"):
            keys["original_max_position_embeddings"] = original
    if "partial_rotary_factor" in scaling and "qk_nope_head_dim" in raw:
        rotated = raw["qk_rope_head_dim"]
        scaling["partial_rotary_factor"] = rotated / (raw["qk_nope_head_dim"] + rotated)
    for name in ("short_factor", "long_factor"):
        if name in scaling:
            scaling[name] = scaling[name][:pairs]
