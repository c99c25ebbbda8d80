"""GLM-4: the first release in Hugging Face's format, and that of April 2025.

Source: GLM Team, "ChatGLM: A Family of Large Language Models from GLM-130B to GLM-4" (2024).
"""

from dataclasses import replace

from gllm.models.describe import attention_of, decoder, gated_mlp, pre_norm, rms_norm
from gllm.models.keys import Keys
from gllm.models.spec import Layer, Model


def glm(keys: Keys) -> Model:
    """Half of each head is rotated, neighbours as pairs."""
    return decoder(keys, [_layer(keys)] * keys.count("num_hidden_layers"))


def glm4(keys: Keys) -> Model:
    """As before, with norms also after each half."""
    layer = replace(
        _layer(keys),
        after_attention=rms_norm(keys, "post_self_attn_layernorm"),
        after_mlp=rms_norm(keys, "post_mlp_layernorm"),
    )
    return decoder(keys, [layer] * keys.count("num_hidden_layers"))


def _layer(keys: Keys) -> Layer:
    keys.assume(attention_bias=True, head_dim=128, num_key_value_heads=2, rms_norm_eps=1.5625e-7)
    rope = {"partial": 0.5, "interleaved": True}
    attention = attention_of(keys, rope, qkv_bias=keys.flag("attention_bias"))
    return pre_norm(keys, attention, gated_mlp(keys, names=("gate_up_proj", "down_proj")))
