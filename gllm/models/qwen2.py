"""Qwen2 and Qwen2.5.

Owns which of the shared parts have biases. Source: Yang et al., "Qwen2 Technical Report" (2024).
"""

from gllm.models.config import ModelConfig
from gllm.models.layers import Attention, DecoderLayer, DenseStage, GatedMLP
from gllm.models.loader import Weights


class Qwen2(DenseStage):
    """Queries, keys and values have biases, nothing else has."""

    @staticmethod
    def layer(config: ModelConfig, weights: Weights) -> DecoderLayer:
        """One layer from its weights."""
        attention = Attention(config, weights.at("self_attn"), qkv_bias=True)
        return DecoderLayer(config, weights, attention, GatedMLP(config, weights.at("mlp")))
