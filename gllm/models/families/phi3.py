"""Phi-3, Phi-3.5 and Phi-4.

Source: Abdin et al., "Phi-3 Technical Report" (2024).
"""

from dataclasses import replace

from gllm.models.describe import (
    attention_of,
    decoder,
    gated_mlp,
    layer_windows,
    pre_norm,
    window_notes,
)
from gllm.models.keys import Keys
from gllm.models.spec import Model


def describe(keys: Keys) -> Model:
    """Llama with fused projections, and windows or stretched rotations in some sizes."""
    keys.assume(rms_norm_eps=1e-5, original_max_position_embeddings=4096)
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        keys.only(name, False)
    for name in ("full_attn_mod", "interpolate_factor"):
        keys.only(name, 1)
    attention = attention_of(keys, {"partial": 1.0}, names=("qkv_proj", "o_proj"))
    mlp = gated_mlp(keys, names=("gate_up_proj", "down_proj"))
    windows = layer_windows(keys, [True] * keys.count("num_hidden_layers"))
    layers = [pre_norm(keys, replace(attention, window=window), mlp) for window in windows]
    return decoder(keys, layers, notes=window_notes(windows))
