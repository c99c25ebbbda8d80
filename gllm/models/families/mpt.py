"""MPT.

Source: MosaicML, "MPT-7B" (2023), https://www.databricks.com/blog/mpt-7b.
"""

from gllm.models.config_reader import ConfigReader
from gllm.models.errors import ModelError
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import EmbeddingSpec, HeadSpec, ModelSpec
from gllm.models.spec.parts import LinearSpec, NormSpec
from gllm.models.spec_builders import layer_norm_spec, plain_mlp_spec


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of MPT: ALiBi, and no biases."""
    hidden = config.positive_int("d_model", default=2048)
    # Training, and positions that ALiBi replaces.
    config.ignore("verbose", "init_config", "init_device", "emb_pdrop", "param_init_fn")
    config.ignore("learned_pos_emb", "ffn_config", "tokenizer_name")
    for name, value in (("no_bias", True), ("embedding_fraction", 1), ("expansion_ratio", 4)):
        config.require_value(name, value)
    config.require_value("norm_type", "low_precision_layernorm", "layernorm")
    config.require_value("logit_scale", None)
    config.require_value("tie_word_embeddings", True)
    mlp = plain_mlp_spec(4 * hidden, "gelu", ("ffn.up_proj", "ffn.down_proj"), bias=False)
    norms = _norm(config, "norm_1"), _norm(config, "norm_2")
    layer = LayerSpec(_attention(config, hidden), mlp, *norms)
    return ModelSpec(
        vocab_size=config.positive_int("vocab_size", default=50368),
        hidden_size=hidden,
        embedding=EmbeddingSpec("transformer.wte"),
        layers=(layer,) * config.positive_int("n_layers", default=24),
        norm=_norm(config, "transformer.norm_f"),
        head=HeadSpec("transformer.wte"),
        context_length=config.positive_int("max_seq_len", default=2048),
        layer_name_format="transformer.blocks.{}",
    )


def _attention(config: ConfigReader, hidden: int) -> AttentionSpec:
    heads = config.positive_int("n_heads", default=16)
    if hidden % heads:
        raise config.error(("n_heads",), f"a divisor of d_model {hidden}", heads)
    nested = config.get("attn_config", default={})
    if not isinstance(nested, dict):
        raise config.error(("attn_config",), "an object", nested)
    try:
        return _read_attention(ConfigReader(nested), hidden, heads)
    except ModelError as error:
        raise ModelError(f"config.json: attn_config: {error}") from error


def _read_attention(options: ConfigReader, hidden: int, heads: int) -> AttentionSpec:
    """Build attention from the object `attn_config`."""
    options.ignore("attn_impl", "attn_pdrop", "softmax_scale", "clip_qkv")
    options.require_value("alibi", True)
    options.require_value("alibi_bias_max", 8)
    options.require_value("attn_type", "multihead_attention")
    for name in ("attn_uses_sequence_id", "prefix_lm", "qk_ln", "rope", "qk_gn"):
        options.require_value(name, False)
    options.check_all_read()
    scale = options.optional_positive_float("softmax_scale")
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        qkv_proj=LinearSpec(("attn.Wqkv",)),
        out_proj=LinearSpec(("attn.out_proj",)),
        scale=scale or (hidden // heads) ** -0.5,
        alibi_scale=1.0,
        qkv_limit=options.optional_positive_float("clip_qkv"),
    )


def _norm(config: ConfigReader, name: str) -> NormSpec:
    return layer_norm_spec(config, name, has_bias=False)
