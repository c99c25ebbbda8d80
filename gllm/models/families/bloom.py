"""BLOOM.

Source: BigScience Workshop, "BLOOM: A 176B-Parameter Open-Access Multilingual Language Model"
(2022).
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.errors import ModelError
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.model import EmbeddingSpec, HeadSpec, ModelSpec
from gllm.models.spec_builders import (
    layer_norm_spec,
    plain_mlp_spec,
    pre_norm_layer,
    sized_attention_spec,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of BLOOM, with ALiBi and a norm after the embedding."""
    hidden = config.positive_int("hidden_size", "n_embed")
    config.require_value("apply_residual_connection_post_layernorm", False)
    config.require_value("tie_word_embeddings", True)
    # Training options and precisions; ALiBi needs no offset here.
    config.ignore("slow_but_exact", "n_inner", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv")
    config.ignore("attention_softmax_in_fp32", "masked_softmax_fusion", "bias_dropout_fusion")
    mlp = plain_mlp_spec(4 * hidden, "gelu_tanh", ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"))
    layer = pre_norm_layer(config, _attention(config, hidden), mlp, layer_norm_spec)
    root = "transformer"
    behind = layer_norm_spec(config, f"{root}.word_embeddings_layernorm")
    return ModelSpec(
        vocab_size=config.positive_int("vocab_size"),
        hidden_size=hidden,
        embedding=EmbeddingSpec(f"{root}.word_embeddings", norm=behind),
        layers=(layer,) * config.positive_int("n_layer", "num_hidden_layers"),
        norm=layer_norm_spec(config, f"{root}.ln_f"),
        head=HeadSpec(f"{root}.word_embeddings"),
        context_length=config.positive_int("seq_length", default=2048),
        layer_name_format=f"{root}.h.{{}}",
    )


def _attention(config: ConfigReader, hidden: int) -> AttentionSpec:
    """Build attention with one tensor for queries, keys and values, stored head by head."""
    heads = config.positive_int("n_head", "num_attention_heads")
    if hidden % heads:
        names = "hidden_size or n_embed", "n_head or num_attention_heads"
        raise ModelError(f"config.json: {names[0]} {hidden} is no multiple of {names[1]} {heads}")
    names = "self_attention.query_key_value", "self_attention.dense"
    attention = sized_attention_spec(heads, hidden // heads, names, True, True)
    return replace(attention, alibi_scale=1.0, is_grouped_by_kv_head=True)
