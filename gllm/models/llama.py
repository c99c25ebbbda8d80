"""Llama 2 and 3, and what is built alike.

Owns which of the shared parts have biases. Source: Touvron et al., "Llama 2" (2023); Grattafiori
et al., "The Llama 3 Herd of Models" (2024).
"""

from gllm.models.config import ModelConfig
from gllm.models.layers import Attention, DecoderLayer, DenseStage, GatedMLP
from gllm.models.loader import Weights


class Llama(DenseStage):
    """Attention and feed-forward have biases where the configuration says so."""

    @staticmethod
    def layer(config: ModelConfig, weights: Weights) -> DecoderLayer:
        """One layer from its weights."""
        bias = config.attention_bias
        attention = Attention(config, weights.at("self_attn"), qkv_bias=bias, out_bias=bias)
        mlp = GatedMLP(config, weights.at("mlp"), bias=config.mlp_bias)
        return DecoderLayer(config, weights, attention, mlp)
