"""Tiny random checkpoints of each family, made with transformers.

Owns the table of families under test: a new family is one row. The weights are spread wider than
an untrained model's, so that norms, biases and attention all show in the logits.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.support.models.foreign_formats import baichuan13, to_baichuan, to_chatglm

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
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


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
}


EIGHT_HEADS = {
    ("hidden_size", "n_embd", "word_embed_proj_dim"): {48: 64},
    ("num_attention_heads", "n_head", "num_key_value_heads", "num_kv_heads"): {6: 8, 3: 4},
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
    with torch.no_grad():
        for label, weight in model.named_parameters():
            # Scales of norms are around 1, everything else around 0.
            is_scale = label.endswith("weight") and ("norm" in label or ".ln_" in label)
            weight.normal_(mean=1.0 if is_scale else 0.0, std=0.2)
        for label, buffer in model.named_buffers():
            if label.endswith("correction_bias"):
                buffer.normal_(std=0.2)
    return model


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
