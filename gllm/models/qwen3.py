"""Qwen3, dense.

Owns which of the shared parts it uses. Source: Yang et al., "Qwen3 Technical Report" (2025).
"""

from gllm.models.config import ModelConfig
from gllm.models.layers import Attention, DecoderLayer, DenseStage, GatedMLP
from gllm.models.loader import Weights


class Qwen3(DenseStage):
    """Queries and keys are normalised head by head instead of having biases."""

    @staticmethod
    def layer(config: ModelConfig, weights: Weights) -> DecoderLayer:
        """One layer from its weights."""
        bias = config.attention_bias
        attention = Attention(
            config, weights.at("self_attn"), qkv_bias=bias, out_bias=bias, qk_norm=True
        )
        return DecoderLayer(config, weights, attention, GatedMLP(config, weights.at("mlp")))
