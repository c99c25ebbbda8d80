"""Qwen3, dense.

Source: Yang et al., "Qwen3 Technical Report" (2025).
"""

from dataclasses import replace

from gllm.models.describe import attention_of, decoder, gated_mlp, pre_norm, rms_norm
from gllm.models.families.qwen2 import qwen_windows
from gllm.models.keys import Keys
from gllm.models.spec import Attention, Model


def describe(keys: Keys) -> Model:
    """Queries and keys are normalised head by head instead of having biases."""
    keys.assume(head_dim=128)
    attention, mlp = qwen3_attention(keys), gated_mlp(keys)
    return decoder(
        keys,
        [pre_norm(keys, replace(attention, window=window), mlp) for window in qwen_windows(keys)],
    )


def qwen3_attention(keys: Keys) -> Attention:
    """Attention with normalised queries and keys, as the mixtures of experts have it too."""
    keys.only("use_qk_norm", True)
    bias = keys.flag("attention_bias")
    return replace(
        attention_of(keys, qkv_bias=bias, out_bias=bias),
        query_norm=rms_norm(keys, "self_attn.q_norm"),
        key_norm=rms_norm(keys, "self_attn.k_norm"),
    )
