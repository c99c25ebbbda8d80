"""OPT.

Source: Zhang et al., "OPT: Open Pre-trained Transformer Language Models" (2022).
"""

from gllm.models.describe import ACTIVATIONS, decoder
from gllm.models.errors import ModelError
from gllm.models.keys import Keys
from gllm.models.spec import MLP, Attention, Embedding, Layer, Linear, Model, Norm, Positions


def describe(keys: Keys) -> Model:
    """Learned positions, of which the first two rows stand for nothing; norms before each half."""
    hidden = keys.count("hidden_size")
    _check(keys, hidden)
    heads = keys.count("num_attention_heads")
    bias = keys.flag("enable_bias", default=True)
    attention = Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        qkv=Linear(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), bias),
        out=Linear(("self_attn.out_proj",), bias),
        scale=(hidden // heads) ** -0.5,
    )
    mlp = MLP(
        inner=keys.count("ffn_dim"),
        activation=keys.choice("activation_function", ACTIVATIONS, "relu"),
        up=Linear(("fc1",), bias),
        down=Linear(("fc2",), bias),
        gated=False,
    )
    layer = Layer(attention, mlp, _norm("self_attn_layer_norm"), _norm("final_layer_norm"))
    longest, root = keys.count("max_position_embeddings"), "model.decoder."
    positions = Positions(f"{root}embed_positions", longest + 2, offset=2)
    return decoder(
        keys,
        [layer] * keys.count("num_hidden_layers"),
        tied=True,
        root=root,
        embedding=Embedding(f"{root}embed_tokens", positions=positions),
        norm=_norm(f"{root}final_layer_norm"),
        optional_prefix="model.",
    )


def _norm(name: str) -> Norm:
    return Norm(name, "layer", 1e-5, bias=True)


def _check(keys: Keys, hidden: int) -> None:
    """Refuse the one size with norms behind the halves and narrower embeddings."""
    keys.only("do_layer_norm_before", True)
    keys.only("word_embed_proj_dim", hidden)
    keys.only("_remove_final_layer_norm", False)
    keys.only("layer_norm_elementwise_affine", True)
    if hidden % keys.count("num_attention_heads"):
        raise ModelError("config.json: hidden_size is no multiple of num_attention_heads")
