"""ChatGLM2, ChatGLM3 and GLM-4 in ChatGLM's own format.

Source: GLM Team, "ChatGLM: A Family of Large Language Models from GLM-130B to GLM-4" (2024), and
the configurations published with the models.
"""

from dataclasses import replace
from functools import partial

from gllm.models.config_reader import ConfigReader
from gllm.models.errors import ModelError
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.model import EmbeddingSpec, HeadSpec, ModelSpec
from gllm.models.spec.parts import RopeSpec
from gllm.models.spec_builders import (
    plain_mlp_spec,
    pre_norm_layer,
    rms_norm_spec,
    sized_attention_spec,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of ChatGLM: fused projections, rotary embedding of half of each head.

    The rotary embedding is interleaved.
    """
    _check(config)
    hidden, bias = config.positive_int("hidden_size"), config.boolean("add_bias_linear")
    size, names = config.positive_int("ffn_hidden_size"), ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    mlp = replace(plain_mlp_spec(size, "silu", names, bias), is_gated=True)
    norm = partial(rms_norm_spec, eps="layernorm_epsilon", default=1e-5)
    layer = pre_norm_layer(config, _attention(config, bias), mlp, norm)
    root = "transformer.encoder"
    return ModelSpec(
        vocab_size=config.positive_int("padded_vocab_size"),
        hidden_size=hidden,
        embedding=EmbeddingSpec("transformer.embedding.word_embeddings"),
        layers=(layer,) * config.positive_int("num_layers"),
        norm=norm(config, f"{root}.final_layernorm"),
        head=HeadSpec("transformer.output_layer"),
        context_length=config.positive_int("seq_length"),
        layer_name_format=f"{root}.layers.{{}}",
    )


def _attention(config: ConfigReader, bias: bool) -> AttentionSpec:
    heads, head_dim = config.positive_int("num_attention_heads"), config.positive_int("kv_channels")
    few = config.boolean("multi_query_attention")
    kv_heads = config.positive_int("multi_query_group_num") if few else heads
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} is no multiple of "
            f"multi_query_group_num {kv_heads}"
        )
    if head_dim % 4:
        raise config.error(
            ("kv_channels",), "a multiple of 4: half of it is rotated, in pairs", head_dim
        )
    theta = 10_000.0 * config.positive_float("rope_ratio", default=1.0)
    if theta < 1:
        raise config.error(("rope_ratio",), "a finite number from 0.0001 on", theta / 10_000.0)
    return sized_attention_spec(
        heads,
        head_dim,
        ("self_attention.query_key_value", "self_attention.dense"),
        qkv_bias=bias or config.boolean("add_qkv_bias"),
        out_bias=bias,
        num_kv_heads=kv_heads,
        rope=RopeSpec(head_dim // 2, theta=theta, is_interleaved=True),
    )


def _check(config: ConfigReader) -> None:
    """Raise ModelError for unsupported variants; ignore keys of training and precision."""
    config.require_value("rmsnorm", True)
    config.require_value("original_rope", True)
    config.require_value("post_layer_norm", True)
    config.require_value("apply_residual_connection_post_layernorm", False)
    config.require_value("tie_word_embeddings", False)
    config.require_value("pre_seq_len", 0)
    config.require_value("quantization_bit", 0)
    # Divides scores by the layer's number and multiplies them by it again.
    config.ignore("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "prefix_projection")
    config.ignore("fp32_residual_connection", "bias_dropout_fusion", "classifier_dropout")
    config.ignore("vocab_size")
    config.require_value("num_hidden_layers", config.positive_int("num_layers"))
