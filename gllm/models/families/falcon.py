"""Falcon.

Source: Almazrouei et al., "The Falcon Series of Open Language Models" (2023).
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.errors import ModelError
from gllm.models.rope import read_rope
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.feed_forward import MLPSpec
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import EmbeddingSpec, ModelSpec
from gllm.models.spec_builders import (
    ACTIVATIONS,
    decoder_model,
    layer_norm_spec,
    plain_mlp_spec,
    pre_norm_layer,
    sized_attention_spec,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Falcon: parallel layers in most sizes; rotary embedding or ALiBi."""
    config.require_value("apply_residual_connection_post_layernorm", False)
    bias = config.boolean("bias")
    hidden = config.positive_int("hidden_size")
    inner = config.positive_int("ffn_hidden_size", default=4 * hidden)
    # The same as a multiple; transformers reads ffn_hidden_size.
    config.require_value("ff_factor", inner / hidden)
    activation = config.choice("activation", ACTIVATIONS, "gelu")
    mlp = plain_mlp_spec(inner, activation, ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"), bias)
    layer = _layer(config, _attention(config, hidden, bias), mlp)
    root = "transformer."
    return decoder_model(
        config,
        [layer] * config.positive_int("num_hidden_layers"),
        tied=True,
        root=root,
        embedding=EmbeddingSpec(f"{root}word_embeddings"),
        layer_name_format=f"{root}h.{{}}",
        norm=layer_norm_spec(config, f"{root}ln_f"),
        context_length=config.positive_int("max_position_embeddings", default=2048),
    )


def _attention(config: ConfigReader, hidden: int, bias: bool) -> AttentionSpec:
    """Build attention with one tensor for queries, keys and values, stored by KV head."""
    heads = config.positive_int("num_attention_heads")
    kv_heads = 1 if config.boolean("multi_query", default=True) else heads
    named = config.positive_int("num_kv_heads", default=heads)
    if config.boolean("new_decoder_architecture"):
        kv_heads = named
    if hidden % heads or heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} fits neither hidden_size {hidden} nor "
            f"num_kv_heads {kv_heads}"
        )
    head_dim, alibi = hidden // heads, config.boolean("alibi")
    if alibi:
        config.ignore("rope_parameters", "rope_scaling", "rope_theta")
    return sized_attention_spec(
        heads,
        head_dim,
        ("self_attention.query_key_value", "self_attention.dense"),
        bias,
        bias,
        num_kv_heads=kv_heads,
        rope=None if alibi else read_rope(config, head_dim),
        # ALiBi is added before the scores are scaled.
        alibi_scale=head_dim**-0.5 if alibi else None,
        is_grouped_by_kv_head=True,
    )


def _layer(config: ConfigReader, attention: AttentionSpec, mlp: MLPSpec) -> LayerSpec:
    grown = config.boolean("new_decoder_architecture")
    parallel = config.boolean("parallel_attn", default=True) or grown
    norms = config.positive_int("num_ln_in_parallel_attn", default=2 if grown else 1)
    if norms != 1 and not (norms == 2 and grown):
        raise ModelError(f"config.json: num_ln_in_parallel_attn {norms} is not implemented here")
    if norms == 2:
        layer = pre_norm_layer(config, attention, mlp, layer_norm_spec, ("ln_attn", "ln_mlp"))
    else:
        layer = pre_norm_layer(config, attention, mlp, layer_norm_spec)
    if parallel and norms == 1:
        return replace(layer, mlp_norm=None, is_parallel=True)
    return replace(layer, is_parallel=parallel)
