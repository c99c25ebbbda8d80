"""KV caches of emulated engines without real bytes: entries as small as the layout permits."""

import math
from collections.abc import Sequence
from dataclasses import replace

from gllm.models.spec import AttentionSpec, LatentAttentionSpec, LayerSpec

Attention = AttentionSpec | LatentAttentionSpec


def shrink_entries(
    layers: Sequence[LayerSpec], model_layers: Sequence[LayerSpec]
) -> list[LayerSpec]:
    """Return layers whose cache entries have fewer elements per head, by one factor for a model.

    Blocks, layers and heads stay, so that transfers consist of the same parts.

    Args:
        layers: of a stage.
        model_layers: all layers of the model.
    """
    factor = math.gcd(*(size for layer in model_layers for size in _sizes(layer.attention)))

    def shrink(attention: Attention) -> Attention:
        if isinstance(attention, AttentionSpec):
            return replace(attention, head_dim=attention.head_dim // factor)
        rope = replace(attention.rope, dim=attention.rope.dim // factor)
        return replace(attention, kv_lora_rank=attention.kv_lora_rank // factor, rope=rope)

    return [replace(layer, attention=shrink(layer.attention)) for layer in layers]


def _sizes(attention: Attention) -> tuple[int, ...]:
    if isinstance(attention, AttentionSpec):
        return (attention.head_dim,)
    return attention.kv_lora_rank, attention.rope.dim
