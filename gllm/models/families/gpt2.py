"""GPT-2.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from dataclasses import replace

from gllm.models.describe import ACTIVATIONS
from gllm.models.errors import ModelError
from gllm.models.keys import Keys
from gllm.models.spec import MLP, Attention, Embedding, Head, Layer, Linear, Model, Norm, Positions


def describe(keys: Keys) -> Model:
    """Learned positions, norms before each half, matrices stored the other way round."""
    hidden, count = keys.count("n_embd", default=768), keys.count("n_layer", default=12)
    longest = keys.count("n_positions", "n_ctx", default=1024)
    # How scores are computed in small types; here it is float32 always.
    keys.skip("reorder_and_upcast_attn")
    # Of a tokenizer without special tokens.
    keys.skip("predict_special_tokens")
    keys.only("n_special", 0)
    keys.only("tie_word_embeddings", True)
    attention, mlp = _attention(keys, hidden), _mlp(keys, hidden)
    by_layer = keys.flag("scale_attn_by_inverse_layer_idx")
    layers = [
        Layer(
            replace(attention, scale=attention.scale / (layer + 1 if by_layer else 1)),
            mlp,
            _norm(keys, "ln_1"),
            _norm(keys, "ln_2"),
        )
        for layer in range(count)
    ]
    return Model(
        vocab_size=keys.count("vocab_size", default=50257),
        hidden_size=hidden,
        embedding=Embedding("transformer.wte", positions=Positions("transformer.wpe", longest)),
        layers=tuple(layers),
        norm=_norm(keys, "transformer.ln_f"),
        head=Head("transformer.wte"),
        context_length=longest,
        layer_name="transformer.h.{}",
        optional_prefix="transformer.",
        # Masks that older files hold.
        ignored=(r".*\.attn\.(bias|masked_bias)",),
    )


def _attention(keys: Keys, hidden: int) -> Attention:
    heads = keys.count("n_head", default=12)
    if hidden % heads:
        raise ModelError(f"config.json: n_embd {hidden} is no multiple of n_head {heads}")
    head_dim = hidden // heads
    return Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        qkv=Linear(("attn.c_attn",), bias=True, transposed=True),
        out=Linear(("attn.c_proj",), bias=True, transposed=True),
        scale=head_dim**-0.5 if keys.flag("scale_attn_weights", default=True) else 1.0,
    )


def _mlp(keys: Keys, hidden: int) -> MLP:
    return MLP(
        inner=keys.count("n_inner", default=4 * hidden),
        activation=keys.choice("activation_function", ACTIVATIONS, "gelu_new"),
        up=Linear(("mlp.c_fc",), bias=True, transposed=True),
        down=Linear(("mlp.c_proj",), bias=True, transposed=True),
        gated=False,
    )


def _norm(keys: Keys, name: str) -> Norm:
    return Norm(name, "layer", keys.positive("layer_norm_epsilon", default=1e-5), bias=True)
