"""Qwen2 and Qwen2.5, dense.

Source: Yang et al., "Qwen2 Technical Report" (2024).
"""

from dataclasses import replace

from gllm.models.describe import (
    attention_of,
    decoder,
    gated_mlp,
    layer_windows,
    pre_norm,
    window_of,
)
from gllm.models.keys import Keys
from gllm.models.spec import Model


def describe(keys: Keys) -> Model:
    """Queries, keys and values have biases, nothing else has."""
    attention, mlp = attention_of(keys, qkv_bias=True), gated_mlp(keys)
    return decoder(
        keys,
        [pre_norm(keys, replace(attention, window=window), mlp) for window in qwen_windows(keys)],
    )


def qwen_windows(keys: Keys) -> list[int | None]:
    """Windows from layer max_window_layers on; sliding_window alone does not switch them on."""
    layers = keys.count("num_hidden_layers")
    first = keys.natural("max_window_layers", default=28)
    if not keys.flag("use_sliding_window"):
        window_of(keys)
        keys.only("layer_types", ["full_attention"] * layers)
        return [None] * layers
    return layer_windows(keys, [layer >= first for layer in range(layers)])
