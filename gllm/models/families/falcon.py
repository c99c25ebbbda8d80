"""Falcon.

Source: Almazrouei et al., "The Falcon Series of Open Language Models" (2023).
"""

from gllm.models.describe import ACTIVATIONS, decoder
from gllm.models.errors import ModelError
from gllm.models.keys import Keys
from gllm.models.rope import rope_of
from gllm.models.spec import MLP, Attention, Embedding, Layer, Linear, Model, Norm


def describe(keys: Keys) -> Model:
    """Both halves of a layer side by side in most sizes; rotations, or biases by distance."""
    keys.only("apply_residual_connection_post_layernorm", False)
    bias = keys.flag("bias")
    hidden = keys.count("hidden_size")
    inner = keys.count("ffn_hidden_size", default=4 * hidden)
    # The same, as a multiple; the library reads ffn_hidden_size.
    keys.only("ff_factor", inner / hidden)
    mlp = MLP(
        inner=inner,
        activation=keys.choice("activation", ACTIVATIONS, "gelu"),
        up=Linear(("mlp.dense_h_to_4h",), bias),
        down=Linear(("mlp.dense_4h_to_h",), bias),
        gated=False,
    )
    layer = _layer(keys, _attention(keys, hidden, bias), mlp)
    root = "transformer."
    return decoder(
        keys,
        [layer] * keys.count("num_hidden_layers"),
        tied=True,
        root=root,
        embedding=Embedding(f"{root}word_embeddings"),
        layer_name=f"{root}h.{{}}",
        norm=_norm(keys, f"{root}ln_f"),
        context_length=keys.count("max_position_embeddings", default=2048),
        optional_prefix=root,
    )


def _attention(keys: Keys, hidden: int, bias: bool) -> Attention:
    """One tensor for queries, keys and values, stored KV head by KV head."""
    heads = keys.count("num_attention_heads")
    kv_heads = 1 if keys.flag("multi_query", default=True) else heads
    named = keys.count("num_kv_heads", default=heads)
    if keys.flag("new_decoder_architecture"):
        kv_heads = named
    if hidden % heads or heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} fits neither hidden_size {hidden} nor "
            f"num_kv_heads {kv_heads}"
        )
    head_dim, alibi = hidden // heads, keys.flag("alibi")
    if alibi:
        keys.skip("rope_parameters", "rope_scaling", "rope_theta")
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qkv=Linear(("self_attention.query_key_value",), bias),
        out=Linear(("self_attention.dense",), bias),
        scale=head_dim**-0.5,
        rope=None if alibi else rope_of(keys, head_dim),
        # Biases are part of the scores that are scaled.
        alibi=head_dim**-0.5 if alibi else None,
        grouped_rows=True,
    )


def _layer(keys: Keys, attention: Attention, mlp: MLP) -> Layer:
    grown = keys.flag("new_decoder_architecture")
    parallel = keys.flag("parallel_attn", default=True) or grown
    norms = keys.count("num_ln_in_parallel_attn", default=2 if grown else 1)
    if parallel and norms == 2 and grown:
        return Layer(attention, mlp, _norm(keys, "ln_attn"), _norm(keys, "ln_mlp"), parallel=True)
    if parallel and norms == 1:
        return Layer(attention, mlp, _norm(keys, "input_layernorm"), None, parallel=True)
    if norms != 1:
        raise ModelError(f"config.json: num_ln_in_parallel_attn {norms} is not implemented here")
    before = _norm(keys, "input_layernorm"), _norm(keys, "post_attention_layernorm")
    return Layer(attention, mlp, *before)


def _norm(keys: Keys, name: str) -> Norm:
    return Norm(name, "layer", keys.positive("layer_norm_epsilon", default=1e-5), bias=True)
