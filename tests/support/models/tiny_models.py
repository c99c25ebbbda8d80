"""Tiny random checkpoints of each family, made with transformers.

Owns the table of families under test: a new family is one row. The weights are spread wider than
an untrained model's, so that norms, biases and attention all show in the logits.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.support.models.foreign_formats import (
    baichuan13,
    to_baichuan,
    to_chatglm,
    to_internlm2,
    to_internlm3,
    to_mimo,
    to_minicpm,
)

SMALL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
OLD = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""For families that do not know all keys of SMALL, or call them otherwise."""
PURE = {
    "vocab_size": 131,
    "hidden_size": 40,
    "num_hidden_layers": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""For families without attention."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG_FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 1.5, 2.5, 4.0]}
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
LATENT_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}
V3_EXPERTS = {
    key: LATENT[key]
    for key in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group")
} | {"topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 1, "norm_topk_prob": True}
DENSE_LATENT = {
    key: value for key, value in LATENT.items() if key.startswith(("num_key", "kv", "qk", "v"))
}
INDEXER = {
    "index_head_dim": 16,
    "index_n_heads": 16,
    "index_topk": 12,
    "q_lora_rank": 24,
    "mlp_layer_types": ["dense", "sparse"] * 2,
}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
ALPHA = {"type": "dynamic", "alpha": 50.0, "factor": 1.0}
BY_LAYER_TYPE = {
    "full_attention": YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
LAGUNA_ROPE = {
    "full_attention": YARN | {"partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
GRANITE = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.4,
}
GEMMA4 = {
    "head_dim": 10,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
    "tie_word_embeddings": True,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

DELTA_NET = {
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "full_attention_interval": 2,
}
SHORT_CONVS = {"layer_types": ["conv", "full_attention", "conv", "conv"]}
MAMBA = {
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 4,
    "mamba_d_state": 11,
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 40}


@dataclass(frozen=True)
class Family:
    """A row: transformers' name of the family, and how this checkpoint differs from `base`."""

    name: str
    options: dict[str, Any]
    base: dict[str, Any] | None = None
    model: str = "ForCausalLM"
    rewrite: (
        Callable[[dict[str, Any], dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]] | None
    ) = None
    """Configuration and tensors in the family's own format, where transformers writes another."""
    reference: Callable[[int], Any] | None = None
    """A model of ours of 6 or 8 heads, where transformers has none."""


def _written(name: str, heads: int) -> Any:
    """A model of tests/support/models/reference_models.py; it has 8 heads in any case."""
    from tests.support.models import reference_models

    return getattr(reference_models, name)()


FAMILIES: dict[str, Family] = {
    "llama2": Family("Llama", {"num_key_value_heads": 6}),
    "llama3": Family("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-biased": Family("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama-linear": Family("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "qwen1": Family("", {}, reference=partial(_written, "Qwen1")),
    "qwen2": Family("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": Family("Qwen2", {"rope_parameters": YARN}),
    "qwen2-window": Family(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 2}
    ),
    "qwen3": Family("Qwen3", {"head_dim": 16}),
    "qwen3-tied": Family("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": Family("Mistral", {"sliding_window": 13}),
    "ministral3": Family(
        "Ministral3",
        {
            "head_dim": 16,
            "rope_parameters": YARN
            | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.7},
        },
    ),
    "mixtral": Family("Mixtral", {"num_local_experts": 5, "sliding_window": None}),
    "qwen2-moe": Family(
        "Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}
    ),
    "qwen3-moe": Family(
        "Qwen3Moe", EXPERTS | {"head_dim": 8, "norm_topk_prob": True, "decoder_sparse_step": 2}
    ),
    "gemma": Family("Gemma", {"head_dim": 10, "tie_word_embeddings": True}),
    "gemma2": Family(
        "Gemma2", {"head_dim": 10, "sliding_window": 9, "attn_logit_softcapping": 5.0}
    ),
    "gemma3": Family(
        "Gemma3Text",
        {"head_dim": 10, "sliding_window": 9, "sliding_window_pattern": 3},
        model="Gemma3ForCausalLM",
    ),
    "gemma4": Family("Gemma4Text", GEMMA4, model="Gemma4ForCausalLM"),
    "gemma4-12b": Family(
        "Gemma4UnifiedText",
        {key: value for key, value in GEMMA4.items() if key != "hidden_size_per_layer_input"},
        model="Gemma4UnifiedForCausalLM",
    ),
    "gemma4-moe": Family(
        "Gemma4Text",
        GEMMA4
        | {
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        model="Gemma4ForCausalLM",
    ),
    "gemma4-e": Family(
        "Gemma4Text",
        GEMMA4
        | {
            "num_hidden_layers": 7,
            "num_kv_shared_layers": 2,
            "attention_k_eq_v": False,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 7,
            "vocab_size_per_layer_input": 131,
            "layer_types": [
                *["sliding_attention"] * 3,
                *["sliding_attention", "full_attention"] * 2,
            ],
        },
        model="Gemma4ForCausalLM",
    ),
    "phi3": Family("Phi3", {"sliding_window": 17}),
    "phi3-long": Family(
        "Phi3",
        {
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **LONG_FACTORS},
            "original_max_position_embeddings": 4,
        },
    ),
    "phi4": Family(
        "Phi3",
        {
            "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4},
            "tie_word_embeddings": True,
        },
    ),
    "glm": Family("Glm", {"head_dim": 8}),
    "glm4": Family("Glm4", {"head_dim": 8}),
    "chatglm": Family("Glm", {"head_dim": 8}, rewrite=to_chatglm),
    "opt": Family("OPT", {"ffn_dim": 80, "word_embed_proj_dim": 48}, OLD),
    "gpt-oss": Family(
        "GptOss",
        {
            "head_dim": 8,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "gpt2": Family(
        "GPT2",
        {"n_embd": 48, "n_layer": 4, "n_head": 6, "n_positions": 256, "vocab_size": 131},
        {"bos_token_id": 1, "eos_token_id": 2},
        model="GPT2LMHeadModel",
    ),
    "falcon-7b": Family("Falcon", {}, OLD),
    "falcon-40b": Family("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, OLD),
    "falcon-11b": Family(
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1},
        OLD,
    ),
    "falcon-rw": Family(
        "Falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}, OLD
    ),
    "bloom": Family(
        "Bloom",
        {"vocab_size": 131, "hidden_size": 48, "n_layer": 4, "n_head": 6, "seq_length": 256},
        {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "cohere": Family("Cohere", {"tie_word_embeddings": True}),
    "cohere-normed": Family("Cohere", {"tie_word_embeddings": True, "use_qk_norm": True}),
    "cohere2": Family("Cohere2", {"head_dim": 8, "sliding_window": 9, "tie_word_embeddings": True}),
    "baichuan-7b": Family("Llama", {"num_key_value_heads": 6}, rewrite=to_baichuan),
    "baichuan2-13b": Family("", {}, reference=baichuan13),
    "deepseek-v1": Family("", {}, reference=partial(_written, "DeepseekV1")),
    "deepseek-v2": Family(
        "DeepseekV2",
        LATENT | {"n_shared_experts": 2, "q_lora_rank": 24, "topk_method": "group_limited_greedy"},
    ),
    "deepseek-v2-lite": Family(
        "DeepseekV2",
        LATENT | {"n_shared_experts": 1, "q_lora_rank": None, "rope_parameters": LATENT_YARN},
    ),
    "deepseek-v3": Family(
        "DeepseekV3",
        LATENT | {"n_shared_experts": 1, "q_lora_rank": 24, "rope_parameters": LATENT_YARN},
    ),
    "afmoe": Family(
        "Afmoe",
        EXPERTS
        | {"head_dim": 8, "sliding_window": 9, "num_shared_experts": 2, "route_scale": 1.7}
        | {"mup_enabled": True, "global_attn_every_n_layers": 2},
    ),
    "apertus": Family("Apertus", {}),
    "arcee": Family("Arcee", {}),
    "cohere2-moe": Family(
        "Cohere2Moe",
        {"head_dim": 8, "sliding_window": 9, "tie_word_embeddings": True, "num_experts": 5}
        | {"first_k_dense_replace": 1, "num_shared_experts": 2, "sliding_window_pattern": 2},
    ),
    "cohere2-moe-sigmoid": Family(
        "Cohere2Moe",
        {"head_dim": 8, "sliding_window": 9, "tie_word_embeddings": True, "num_experts": 5}
        | {"expert_selection_fn": "sigmoid", "rms_norm_eps": 1e-5},
    ),
    "cwm": Family("Cwm", {"head_dim": 8, "sliding_window": 9}),
    "deepseek-v3.2": Family("DeepseekV32", LATENT | INDEXER | {"n_shared_experts": 1}),
    "dots1": Family(
        "Dots1",
        V3_EXPERTS | {"head_dim": 8, "sliding_window": 9, "max_window_layers": 2},
    ),
    "ernie4.5": Family("Ernie4_5", {"head_dim": 8, "tie_word_embeddings": True}),
    "ernie4.5-moe": Family(
        "Ernie4_5_Moe",
        {
            "moe_intermediate_size": 32,
            "moe_k": 2,
            "moe_layer_end_index": 2,
            "moe_num_experts": 5,
            "moe_num_shared_experts": 2,
        },
    ),
    "exaone4": Family("Exaone4", {"sliding_window": 9}),
    "exaone-moe": Family(
        "ExaoneMoe",
        EXPERTS | {"num_experts": 8, "sliding_window": 9, "n_group": 4, "topk_group": 2},
    ),
    "flex-olmo": Family("FlexOlmo", {"num_experts": 5, "num_experts_per_tok": 2}),
    "flint": Family(
        "Flint",
        EXPERTS
        | {"head_dim": 8, "sliding_window": 9, "shared_expert_intermediate_size": 40}
        | {"layer_types": ["full_attention", "sliding_attention"] * 2, "mlp_only_layers": [1]},
    ),
    "kolibri": Family(
        "Kolibri1",
        EXPERTS
        | {"head_dim": 8, "sliding_window": 9, "shared_expert_intermediate_size": 40}
        | {"layer_types": ["full_attention", "sliding_attention"] * 2, "norm_topk_prob": True},
    ),
    "laguna": Family(
        "Laguna",
        EXPERTS
        | {"head_dim": 8, "sliding_window": 9, "shared_expert_intermediate_size": 40}
        | {"layer_types": ["full_attention", "sliding_attention"] * 2}
        | {"num_attention_heads_per_layer": [6, 4, 6, 2], "moe_routed_scaling_factor": 1.7}
        | {"rope_parameters": LAGUNA_ROPE},
    ),
    "glm-dsa": Family("GlmMoeDsa", LATENT | INDEXER | {"n_shared_experts": 1}),
    "glm4-moe": Family(
        "Glm4Moe", V3_EXPERTS | {"head_dim": 8, "attention_bias": True, "use_qk_norm": True}
    ),
    "glm4-moe-lite": Family(
        "Glm4MoeLite", LATENT | {"q_lora_rank": 24, "mlp_layer_types": ["dense", "sparse"] * 2}
    ),
    "gpt-bigcode": Family("GPTBigCode", {"n_inner": 80}, OLD),
    "gpt-bigcode-heads": Family("GPTBigCode", {"multi_query": False}, OLD),
    "gpt-neo": Family(
        "GPTNeo", {"attention_types": [[["global", "local"], 2]], "window_size": 9}, OLD
    ),
    "gptj": Family("GPTJ", {"rotary_dim": 4, "tie_word_embeddings": False}, OLD),
    "gpt-neox": Family("GPTNeoX", {"intermediate_size": 80, "rope_parameters": PARTIAL}, OLD),
    "gpt-neox-sequential": Family(
        "GPTNeoX",
        {"intermediate_size": 80, "rope_parameters": PARTIAL, "use_parallel_residual": False},
        OLD,
    ),
    "granite": Family("Granite", GRANITE | {"tie_word_embeddings": True}),
    "granite-moe": Family("GraniteMoe", GRANITE | {"num_local_experts": 5}),
    "granite-moe-shared": Family(
        "GraniteMoeShared", GRANITE | {"num_local_experts": 5, "shared_intermediate_size": 40}
    ),
    "granite-moe-swa": Family(
        "GraniteMoeSWA",
        GRANITE | {"num_local_experts": 5, "shared_intermediate_size": 40, "sliding_window": 9},
    ),
    "granite-swa": Family(
        "GraniteSWA", GRANITE | {"sliding_window": 9, "layer_rope_theta": [0, 100.0, 1e4, 500]}
    ),
    "helium": Family("Helium", {"head_dim": 8}),
    "hunyuan": Family("HunYuanDenseV1", {"head_dim": 8, "rope_scaling": ALPHA}),
    "hunyuan-moe": Family("HunYuanMoEV1", {"head_dim": 8, "num_experts": 5, "moe_topk": 2}),
    "hy3": Family(
        "HYV3", EXPERTS | {"head_dim": 8, "num_shared_experts": 2, "router_scaling_factor": 1.7}
    ),
    "hyperclovax": Family("HyperCLOVAX", GRANITE),
    "internlm2": Family("Llama", {}, rewrite=to_internlm2),
    "internlm3": Family(
        "InternLM3", {"head_dim": 8}, model="LlamaForCausalLM", rewrite=to_internlm3
    ),
    "jais2": Family("Jais2", {}),
    "llama4": Family(
        "Llama4Text",
        {"head_dim": 8, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2}
        | {"num_local_experts": 4, "attention_chunk_size": 11, "floor_scale": 8},
        model="Llama4ForCausalLM",
    ),
    "mellum": Family(
        "Mellum",
        EXPERTS
        | {"head_dim": 8, "sliding_window": 9, "rope_parameters": BY_LAYER_TYPE}
        | {"layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "mimo": Family("Qwen2", {}, rewrite=to_mimo),
    "mimo-v2-flash": Family(
        "MiMoV2Flash",
        {
            "head_dim": 12,
            "v_head_dim": 10,
            "num_key_value_heads": 1,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "sliding_window": 9,
        },
    ),
    "minicpm": Family("Granite", GRANITE | {"attention_multiplier": 8**-0.5}, rewrite=to_minicpm),
    "minicpm3": Family(
        "MiniCPM3",
        DENSE_LATENT
        | {"dim_model_base": 24, "q_lora_rank": 24, "scale_depth": 0.8, "scale_emb": 3},
    ),
    "minimax-m2": Family(
        "MiniMaxM2", {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2}
    ),
    "ministral": Family(
        "Ministral",
        {
            "head_dim": 8,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "mistral4": Family(
        "Mistral4",
        LATENT
        | {"n_shared_experts": 1, "q_lora_rank": 24, "num_local_experts": 8}
        | {"rope_parameters": LATENT_YARN | {"llama_4_scaling_beta": 0.3}},
    ),
    "nemotron": Family("Nemotron", {"head_dim": 8}),
    "mpt": Family(
        "Mpt",
        {"d_model": 48, "n_heads": 6, "n_layers": 4, "max_seq_len": 256, "vocab_size": 131}
        | {"attn_config": {"clip_qkv": 0.9}},
        {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "nanochat": Family("NanoChat", {}),
    "olmo": Family("Olmo", {"clip_qkv": 0.5}),
    "olmo2": Family("Olmo2", {}),
    "olmo3": Family("Olmo3", {"sliding_window": 9, "rope_parameters": BY_LAYER_TYPE}),
    "olmoe": Family("Olmoe", {"num_experts": 5, "num_experts_per_tok": 2}),
    "phi": Family("Phi", {}),
    "phi-moe": Family(
        "Phimoe",
        {"num_local_experts": 5, "attention_bias": True, "lm_head_bias": True}
        | {"router_jitter_noise": 0.4},
    ),
    "seed-oss": Family("SeedOss", {"head_dim": 16, "attention_bias": True}),
    "smollm3": Family("SmolLM3", {"no_rope_layer_interval": 2}),
    "solar-open": Family("SolarOpen", V3_EXPERTS | {"head_dim": 8, "first_k_dense_replace": 0}),
    "stablelm": Family("StableLm", {"use_qkv_bias": True}),
    "stablelm-parallel": Family("StableLm", {"use_parallel_residual": True}),
    "starcoder2": Family("Starcoder2", {"sliding_window": 9}),
    "vault-gemma": Family(
        "VaultGemma", {"head_dim": 10, "sliding_window": 9, "tie_word_embeddings": True}
    ),
    "youtu": Family("Youtu", DENSE_LATENT | {"q_lora_rank": 24, "tie_word_embeddings": True}),
    "nemotron-h": Family(
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
            "head_dim": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 6,
            "n_groups": 2,
            "ssm_state_size": 11,
            "n_routed_experts": 5,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3-next": Family(
        "Qwen3Next", DELTA_NET | EXPERTS | SHARED_EXPERT | {"mlp_only_layers": [1]}
    ),
    "qwen3.5": Family(
        "Qwen3_5Text", DELTA_NET | {"tie_word_embeddings": True}, model="Qwen3_5ForCausalLM"
    ),
    "qwen3.5-moe": Family(
        "Qwen3_5MoeText", DELTA_NET | EXPERTS | SHARED_EXPERT, model="Qwen3_5MoeForCausalLM"
    ),
    "granite-hybrid": Family(
        "GraniteMoeHybrid",
        GRANITE | MAMBA | {"num_local_experts": 5, "shared_intermediate_size": 40},
    ),
    "granite-hybrid-dense": Family(
        "GraniteMoeHybrid",
        GRANITE
        | MAMBA
        | {"num_local_experts": 0, "mamba_n_groups": 1, "position_embedding_type": "rope"},
    ),
    "falcon-h1": Family(
        "FalconH1",
        {
            "mamba_d_ssm": 48,
            "mamba_n_heads": 8,
            "mamba_n_groups": 4,
            "mamba_d_state": 11,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.6,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.8,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
            "mlp_multipliers": [1.4, 0.6],
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.5,
        },
    ),
    "lfm2": Family(
        "Lfm2", SHORT_CONVS | {"block_multiple_of": 16, "conv_bias": True, "conv_L_cache": 4}
    ),
    "lfm2-moe": Family(
        "Lfm2Moe", SHORT_CONVS | EXPERTS | {"num_dense_layers": 1, "tie_word_embeddings": True}
    ),
    "lfm3": Family(
        "Lfm3",
        {
            "head_dim": 8,
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
            "sliding_window": 9,
            "tie_word_embeddings": True,
        },
    ),
    "bamba": Family(
        "Bamba",
        {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 11},
    ),
    "mamba": Family("Mamba", {"state_size": 5, "time_step_rank": 6}, PURE),
    "falcon-mamba": Family(
        "FalconMamba", {"state_size": 5, "expand": 1, "use_bias": True, "time_step_rank": 4}, PURE
    ),
    "mamba2": Family(
        "Mamba2",
        {"num_heads": 8, "head_dim": 10, "n_groups": 4, "state_size": 11, "chunk_size": 16},
        PURE,
    ),
    "jamba": Family(
        "Jamba",
        {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 5}
        | {"mamba_d_state": 5, "mamba_dt_rank": 4},
    ),
    "minimax-text-01": Family(
        "MiniMax",
        {
            "num_local_experts": 5,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "block_size": 7,
            "full_attn_alpha_factor": 1.3,
            "linear_attn_alpha_factor": 0.7,
            "mlp_alpha_factor": 1.6,
            "full_attn_beta_factor": 0.8,
            "linear_attn_beta_factor": 0.8,
            "mlp_beta_factor": 0.8,
        },
    ),
    "ling3": Family(
        "BailingHybrid",
        DENSE_LATENT
        | {
            "head_dim": 6,
            "layer_group_size": 2,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 32,
            "num_expert_group": 4,
            "num_nextn_predict_layers": 0,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "kimi-linear": Family(
        "KimiLinear",
        DENSE_LATENT
        | {
            "linear_attn_config": {
                "full_attn_layers": [2],
                "kda_layers": [1, 3, 4],
                "head_dim": 6,
                "num_heads": 8,
                "short_conv_kernel_size": 4,
            },
            "num_experts": 8,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 32,
            "num_expert_group": 4,
            "topk_group": 2,
        },
    ),
}
HYBRIDS = [*FAMILIES][[*FAMILIES].index("nemotron-h") :]
"""Families with recurrent layers."""

EIGHT_HEADS = {
    ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"): {48: 64},
    ("num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "num_kv_heads"): {
        6: 8,
        3: 4,
    },
}
"""Values of keys with 6 heads, and those with 8, which 2, 4 and 8 ranks can divide."""


def sizes(row: Family, heads: int = 6) -> dict[str, Any]:
    """The configuration of a row, with 6 or 8 heads."""
    options = (SMALL if row.base is None else row.base) | row.options
    if heads == 6:
        return options
    assert heads == 8, "the tiny models have 6 or 8 heads"
    for keys, values in EIGHT_HEADS.items():
        options |= {key: values.get(options[key], options[key]) for key in keys if key in options}
    return options


@cache
def reference(family: str, seed: int = 0, heads: int = 6) -> Any:
    """The model of a family that ours is held against, float32, evaluating; of 6 or 8 heads."""
    import torch
    import transformers

    row = FAMILIES[family]
    torch.manual_seed(seed)
    if row.reference is not None:
        model = row.reference(heads)
    else:
        config = getattr(transformers, row.name + "Config")(**sizes(row, heads))
        name = row.model if row.model != "ForCausalLM" else row.name + row.model
        made = getattr(transformers, name, None) or _hidden(name)
        model = made(config).eval()
        use_recurrent_rule(model)
    return randomize(model)


def randomize(model: Any) -> Any:
    """Replace all weights of a model by random ones; the model."""
    import torch

    with torch.no_grad():
        for label, weight in model.named_parameters():
            # Scales of norms are around 1, everything else around 0.
            is_scale = label.endswith("weight") and ("norm" in label or ".ln_" in label)
            weight.normal_(mean=1.0 if is_scale else 0.0, std=0.2)
        for label, buffer in model.named_buffers():
            if label.endswith("correction_bias"):
                buffer.normal_(std=0.2)
            if label.endswith("layer_scalar"):
                buffer.normal_(mean=1.0, std=0.2)
    return model


def use_recurrent_rule(model: Any) -> None:
    """Compute delta nets token by token: transformers pads the last chunk of a prompt instead."""
    module = sys.modules[type(model).__module__]
    for rule in ("torch_{}_gated_delta_rule", "{}_kimi_delta_attention"):
        if hasattr(module, rule.format("chunk")):
            setattr(module, rule.format("chunk"), getattr(module, rule.format("recurrent")))


def _hidden(name: str) -> Any:
    """A class that the library's top level does not show."""
    from transformers.models.gpt2 import modeling_gpt2

    return getattr(modeling_gpt2, name)


def save(family: str, folder: Path, seed: int = 0, shard: str = "1GB", heads: int = 6) -> Path:
    """Write the family's checkpoint, of 6 or 8 heads; the folder."""
    from safetensors.torch import load_file, save_file

    row = FAMILIES[family]
    reference(family, seed, heads).save_pretrained(folder, max_shard_size=shard)
    if row.rewrite is not None:
        config = json.loads((folder / "config.json").read_text())
        config, tensors = row.rewrite(config, load_file(folder / "model.safetensors"))
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
    return folder
