"""BLOOM.

Source: BigScience Workshop, "BLOOM: A 176B-Parameter Open-Access Multilingual Language Model"
(2022).
"""

from gllm.models.errors import ModelError
from gllm.models.keys import Keys
from gllm.models.spec import MLP, Attention, Embedding, Head, Layer, Linear, Model, Norm


def describe(keys: Keys) -> Model:
    """Biases by distance instead of positions; a norm behind the embedding."""
    hidden = keys.count("hidden_size", "n_embed")
    keys.only("apply_residual_connection_post_layernorm", False)
    keys.only("tie_word_embeddings", True)
    # How training splits sums, and precisions; the biases of ALiBi need no offset here.
    keys.skip("slow_but_exact", "n_inner", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv")
    keys.skip("attention_softmax_in_fp32", "masked_softmax_fusion", "bias_dropout_fusion")
    mlp = MLP(
        inner=4 * hidden,
        activation="gelu_tanh",
        up=Linear(("mlp.dense_h_to_4h",), bias=True),
        down=Linear(("mlp.dense_4h_to_h",), bias=True),
        gated=False,
    )
    before = _norm(keys, "input_layernorm"), _norm(keys, "post_attention_layernorm")
    layer = Layer(_attention(keys, hidden), mlp, *before)
    root = "transformer"
    behind = _norm(keys, f"{root}.word_embeddings_layernorm")
    return Model(
        vocab_size=keys.count("vocab_size"),
        hidden_size=hidden,
        embedding=Embedding(f"{root}.word_embeddings", norm=behind),
        layers=(layer,) * keys.count("n_layer", "num_hidden_layers"),
        norm=_norm(keys, f"{root}.ln_f"),
        head=Head(f"{root}.word_embeddings"),
        context_length=keys.count("seq_length", default=2048),
        layer_name=f"{root}.h.{{}}",
        optional_prefix=f"{root}.",
    )


def _attention(keys: Keys, hidden: int) -> Attention:
    """One tensor for queries, keys and values, stored head by head."""
    heads = keys.count("n_head", "num_attention_heads")
    if hidden % heads:
        names = "hidden_size or n_embed", "n_head or num_attention_heads"
        raise ModelError(f"config.json: {names[0]} {hidden} is no multiple of {names[1]} {heads}")
    head_dim = hidden // heads
    return Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        qkv=Linear(("self_attention.query_key_value",), bias=True),
        out=Linear(("self_attention.dense",), bias=True),
        scale=head_dim**-0.5,
        alibi=1.0,
        grouped_rows=True,
    )


def _norm(keys: Keys, name: str) -> Norm:
    return Norm(name, "layer", keys.positive("layer_norm_epsilon", default=1e-5), bias=True)
