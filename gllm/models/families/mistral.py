"""Mistral.

Source: Jiang et al., "Mistral 7B" (2023).
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
    """Llama with a sliding window in every layer, unless sliding_window is null."""
    keys.assume(num_key_value_heads=8, sliding_window=4096)
    attention, mlp = attention_of(keys), gated_mlp(keys)
    windows = layer_windows(keys, [True] * keys.count("num_hidden_layers"))
    layers = [pre_norm(keys, replace(attention, window=window), mlp) for window in windows]
    return decoder(keys, layers, notes=window_notes(windows))
