"""Llama 2 and 3, and what is built alike.

Source: Touvron et al., "Llama 2" (2023); Grattafiori et al., "The Llama 3 Herd of Models" (2024).
"""

from gllm.models.describe import attention_of, decoder, gated_mlp, pre_norm
from gllm.models.keys import Keys
from gllm.models.spec import Model


def describe(keys: Keys) -> Model:
    """Attention and feed-forward have biases where the configuration says so."""
    bias = keys.flag("attention_bias")
    attention = attention_of(keys, qkv_bias=bias, out_bias=bias)
    mlp = gated_mlp(keys, bias=keys.flag("mlp_bias"))
    return decoder(keys, [pre_norm(keys, attention, mlp)] * keys.count("num_hidden_layers"))
