"""Mixtral.

Source: Jiang et al., "Mixtral of Experts" (2024).
"""

from dataclasses import replace

from gllm.models.describe import (
    attention_of,
    check_experts,
    decoder,
    gated_mlp,
    layer_windows,
    pre_norm,
    window_notes,
)
from gllm.models.keys import Keys
from gllm.models.spec import Experts, Linear, Model


def describe(keys: Keys) -> Model:
    """Mistral with experts for feed-forward blocks, two of them for each token."""
    keys.assume(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1_000_000.0)
    attention = attention_of(keys)
    experts = check_experts(
        Experts(
            count=keys.count("num_local_experts", default=8),
            active=keys.count("num_experts_per_tok", default=2),
            router=Linear(("block_sparse_moe.gate",)),
            expert=gated_mlp(keys, "block_sparse_moe.experts.{}", names=("w1", "w3", "w2")),
            normalize=True,
        )
    )
    windows = layer_windows(keys, [True] * keys.count("num_hidden_layers"))
    layers = [pre_norm(keys, replace(attention, window=window), experts) for window in windows]
    return decoder(keys, layers, notes=window_notes(windows))
