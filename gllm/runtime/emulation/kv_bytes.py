"""KV caches of emulated engines without real bytes: entries as small as the layout permits."""

import math
from collections.abc import Sequence
from dataclasses import replace

from gllm.models.spec.attention import AttentionSpec, LatentAttentionSpec
from gllm.models.spec.layer import LayerSpec, SequenceMixerSpec


def shrink_entries(
    layers: Sequence[LayerSpec], model_layers: Sequence[LayerSpec]
) -> list[LayerSpec]:
    """Return layers with smaller KV cache entries: head dimensions divided by their common divisor.

    Blocks, layers and heads stay the same, so that KV transfers have the same number of parts.

    Args:
        layers: layers of a stage, which are returned with smaller heads.
        model_layers: all layers of the model, which determine the divisor.
    """
    factor = math.gcd(*(size for layer in model_layers for size in _sizes(layer.attention)))

    def shrink(attention: SequenceMixerSpec) -> SequenceMixerSpec:
        if isinstance(attention, AttentionSpec):
            return replace(attention, head_dim=attention.head_dim // factor)
        if not isinstance(attention, LatentAttentionSpec):
            return attention
        return replace(
            attention,
            kv_lora_rank=attention.kv_lora_rank // factor,
            rope_head_dim=attention.rope_head_dim // factor,
        )

    return [replace(layer, attention=shrink(layer.attention)) for layer in layers]


def _sizes(attention: SequenceMixerSpec) -> tuple[int, ...]:
    if isinstance(attention, AttentionSpec):
        return (attention.head_dim,)
    if not isinstance(attention, LatentAttentionSpec):
        return ()
    return attention.kv_lora_rank, attention.rope_head_dim
