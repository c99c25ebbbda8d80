"""ChatGLM2, ChatGLM3 and GLM-4 in ChatGLM's own format.

Source: GLM Team, "ChatGLM: A Family of Large Language Models from GLM-130B to GLM-4" (2024), and
the configurations published with the models.
"""

from gllm.models.errors import ModelError
from gllm.models.keys import Keys
from gllm.models.spec import MLP, Attention, Embedding, Head, Layer, Linear, Model, Norm, Rope


def describe(keys: Keys) -> Model:
    """GLM-4 by other names: fused projections, half of each head rotated, neighbours as pairs."""
    _check(keys)
    hidden, bias = keys.count("hidden_size"), keys.flag("add_bias_linear")
    layer = Layer(
        attention=_attention(keys, bias),
        mlp=MLP(
            inner=keys.count("ffn_hidden_size"),
            activation="silu",
            up=Linear(("mlp.dense_h_to_4h",), bias),
            down=Linear(("mlp.dense_4h_to_h",), bias),
        ),
        attention_norm=_norm(keys, "input_layernorm"),
        mlp_norm=_norm(keys, "post_attention_layernorm"),
    )
    root = "transformer.encoder"
    return Model(
        vocab_size=keys.count("padded_vocab_size"),
        hidden_size=hidden,
        embedding=Embedding("transformer.embedding.word_embeddings"),
        layers=(layer,) * keys.count("num_layers"),
        norm=_norm(keys, f"{root}.final_layernorm"),
        head=Head("transformer.output_layer"),
        context_length=keys.count("seq_length"),
        layer_name=f"{root}.layers.{{}}",
    )


def _attention(keys: Keys, bias: bool) -> Attention:
    heads, head_dim = keys.count("num_attention_heads"), keys.count("kv_channels")
    few = keys.flag("multi_query_attention")
    kv_heads = keys.count("multi_query_group_num") if few else heads
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} is no multiple of "
            f"multi_query_group_num {kv_heads}"
        )
    if head_dim % 4:
        raise keys.error(
            ("kv_channels",), "a multiple of 4: half of it is rotated, in pairs", head_dim
        )
    theta = 10_000.0 * keys.positive("rope_ratio", default=1.0)
    if theta < 1:
        raise keys.error(("rope_ratio",), "a finite number from 0.0001 on", theta / 10_000.0)
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qkv=Linear(("self_attention.query_key_value",), bias or keys.flag("add_qkv_bias")),
        out=Linear(("self_attention.dense",), bias),
        scale=head_dim**-0.5,
        rope=Rope(head_dim // 2, theta=theta, interleaved=True),
    )


def _norm(keys: Keys, name: str) -> Norm:
    return Norm(name, "rms", keys.positive("layernorm_epsilon", default=1e-5))


def _check(keys: Keys) -> None:
    """Refuse what other models of this format have; the rest is about training and precision."""
    keys.only("rmsnorm", True)
    keys.only("original_rope", True)
    keys.only("post_layer_norm", True)
    keys.only("apply_residual_connection_post_layernorm", False)
    keys.only("tie_word_embeddings", False)
    keys.only("pre_seq_len", 0)
    keys.only("quantization_bit", 0)
    # Divides scores by the layer's number and multiplies them by it again.
    keys.skip("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "prefix_projection")
    keys.skip("fp32_residual_connection", "bias_dropout_fusion", "classifier_dropout")
    keys.skip("vocab_size")
    keys.only("num_hidden_layers", keys.count("num_layers"))
