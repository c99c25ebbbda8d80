"""Qwen3, mixtures of experts.

Source: Yang et al., "Qwen3 Technical Report" (2025).
"""

from gllm.models.describe import decoder
from gllm.models.families.qwen2_moe import qwen_experts, sparse_layers
from gllm.models.families.qwen3 import qwen3_attention
from gllm.models.keys import Keys
from gllm.models.spec import Model


def describe(keys: Keys) -> Model:
    """Qwen3 with experts, none of them shared by all tokens."""
    keys.assume(num_key_value_heads=4)
    experts = qwen_experts(keys, default=128)
    return decoder(keys, sparse_layers(keys, qwen3_attention(keys), experts))
