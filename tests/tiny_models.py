"""Tiny random checkpoints of each family, made with transformers.

Owns the table of families under test: a new family is one row. The weights are spread wider than
an untrained model's, so that norms, biases and attention all show in the logits.
"""

from functools import cache
from pathlib import Path
from typing import Any

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
    "tie_word_embeddings": False,
}
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
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 6}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


@cache
def reference(family: str, seed: int = 0) -> Any:
    """The transformers model of a family, float32, evaluating."""
    import torch
    import transformers

    name, options = FAMILIES[family]
    config = getattr(transformers, name + "Config")(**SMALL | options)
    torch.manual_seed(seed)
    model = getattr(transformers, name + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for label, weight in model.named_parameters():
            # Scales of norms are around 1, everything else around 0.
            weight.normal_(mean=1.0 if "norm" in label else 0.0, std=0.2)
    return model


def save(family: str, folder: Path, seed: int = 0, shard: str = "1GB") -> Path:
    """Write the family's checkpoint; the folder."""
    reference(family, seed).save_pretrained(folder, max_shard_size=shard)
    return folder
