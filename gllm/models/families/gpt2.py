"""GPT-2.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.errors import ModelError
from gllm.models.spec import (
    AttentionSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    LinearSpec,
    MLPSpec,
    ModelSpec,
    PositionEmbeddingSpec,
)
from gllm.models.spec_builders import ACTIVATIONS, layer_norm_spec, plain_mlp_spec


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of GPT-2, with learned positions and weights stored transposed."""
    hidden = config.positive_int("n_embd", default=768)
    count = config.positive_int("n_layer", default=12)
    longest = config.positive_int("n_positions", "n_ctx", default=1024)
    # Precision of scores, which is always float32 here.
    config.ignore("reorder_and_upcast_attn")
    # Tokenizer without special tokens.
    config.ignore("predict_special_tokens")
    config.require_value("n_special", 0)
    config.require_value("tie_word_embeddings", True)
    attention, mlp = _attention(config, hidden), _mlp(config, hidden)
    by_layer = config.boolean("scale_attn_by_inverse_layer_idx")
    layers = [
        LayerSpec(
            replace(attention, scale=attention.scale / (layer + 1 if by_layer else 1)),
            mlp,
            layer_norm_spec(config, "ln_1"),
            layer_norm_spec(config, "ln_2"),
        )
        for layer in range(count)
    ]
    return ModelSpec(
        vocab_size=config.positive_int("vocab_size", default=50257),
        hidden_size=hidden,
        embedding=EmbeddingSpec(
            "transformer.wte", positions=PositionEmbeddingSpec("transformer.wpe", longest)
        ),
        layers=tuple(layers),
        norm=layer_norm_spec(config, "transformer.ln_f"),
        head=HeadSpec("transformer.wte"),
        context_length=longest,
        layer_name_format="transformer.h.{}",
        # Masks in older files.
        ignored_tensors=(r".*\.attn\.(bias|masked_bias)",),
    )


def _attention(config: ConfigReader, hidden: int) -> AttentionSpec:
    heads = config.positive_int("n_head", default=12)
    if hidden % heads:
        raise ModelError(f"config.json: n_embd {hidden} is no multiple of n_head {heads}")
    head_dim = hidden // heads
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        qkv_proj=LinearSpec(("attn.c_attn",), has_bias=True, is_transposed=True),
        out_proj=LinearSpec(("attn.c_proj",), has_bias=True, is_transposed=True),
        scale=head_dim**-0.5 if config.boolean("scale_attn_weights", default=True) else 1.0,
    )


def _mlp(config: ConfigReader, hidden: int) -> MLPSpec:
    size = config.positive_int("n_inner", default=4 * hidden)
    activation = config.choice("activation_function", ACTIVATIONS, "gelu_new")
    return plain_mlp_spec(size, activation, ("mlp.c_fc", "mlp.c_proj"), is_transposed=True)
