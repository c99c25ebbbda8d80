"""Command R and Command R7B.

Source: the configurations published with the models; Cohere, "Command A" (2025), section 2.1.
"""

from dataclasses import replace

from gllm.models.describe import attention_of, decoder, gated_mlp, layer_windows
from gllm.models.keys import Keys
from gllm.models.spec import Attention, Layer, Model, Norm


def cohere(keys: Keys) -> Model:
    """Both halves of a layer side by side behind one norm without bias; scaled logits."""
    keys.assume(rope_theta=500_000.0)
    attention = _attention(keys)
    if keys.flag("use_qk_norm"):
        norms = _norm(keys, "self_attn.q_norm"), _norm(keys, "self_attn.k_norm")
        attention = replace(attention, query_norm=norms[0], key_norm=norms[1], norm_by_head=True)
    return _model(keys, [attention] * keys.count("num_hidden_layers"))


def cohere2(keys: Keys) -> Model:
    """Three layers with a window and rotations, then one that sees all and knows no positions."""
    keys.assume(sliding_window=4096)
    attention = _attention(keys)
    pattern = keys.count("sliding_window_pattern", "_sliding_window_pattern", default=4)
    keys.only("use_qk_norm", False)
    keys.only("order_of_interleaved_layers", "local_attn_first")
    keys.only("position_embedding_type", "rope_gptj")
    keys.only("rotary_pct", 1)
    keys.only("layer_switch", pattern)
    for name in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block"):
        keys.only(name, True)
    # How the embedding was spread over devices; how the library caches.
    keys.skip("use_parallel_embedding", "cache_implementation")
    count = keys.count("num_hidden_layers")
    slides = [(layer + 1) % pattern != 0 for layer in range(count)]
    windows = layer_windows(keys, slides, required=True)
    everywhere = replace(attention, rope=None)
    return _model(
        keys,
        [everywhere if window is None else replace(attention, window=window) for window in windows],
    )


def _attention(keys: Keys) -> Attention:
    bias = keys.flag("attention_bias")
    return attention_of(keys, {"interleaved": True}, bias, bias)


def _model(keys: Keys, attentions: list[Attention]) -> Model:
    mlp, norm = gated_mlp(keys), _norm(keys, "input_layernorm")
    layers = [Layer(attention, mlp, norm, None, parallel=True) for attention in attentions]
    # Rotations reach further than the positions that files name.
    longest = keys.count("model_max_length", "max_position_embeddings")
    model = decoder(keys, layers, tied=True, norm=_norm(keys, "model.norm"), context_length=longest)
    scale = keys.positive("logit_scale", default=0.0625)
    return replace(model, head=replace(model.head, scale=scale))


def _norm(keys: Keys, name: str) -> Norm:
    return Norm(name, "layer", keys.positive("layer_norm_eps", default=1e-5))
