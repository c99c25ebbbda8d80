"""GPT-2, and StarCoder 1 and SantaCoder (GPT-BigCode).

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019); Li et al.,
"StarCoder" (2023), section 5.1.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.errors import ModelError
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.feed_forward import MLPSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import (
    ACTIVATIONS,
    gpt2_model,
    layer_norm_spec,
    plain_mlp_spec,
    pre_norm_layer,
    sized_attention_spec,
)


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
    scales = [attention.scale / (layer + 1 if by_layer else 1) for layer in range(count)]
    layers = [
        pre_norm_layer(
            config, replace(attention, scale=scale), mlp, layer_norm_spec, ("ln_1", "ln_2")
        )
        for scale in scales
    ]
    return gpt2_model(config, hidden, layers, longest)


def build_bigcode_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of GPT-BigCode: GPT-2 with one KV head."""
    # Precision of the scores, and options of the authors' server.
    config.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    config.ignore("inference_runner", "max_batch_size", "pad_key_length", "pre_allocate_kv_cache")
    # The KV heads are those that multi_query means.
    config.ignore("validate_runner_input", "num_key_value_heads")
    has_one = config.boolean("multi_query", default=True)
    model = build_spec(config)
    layer = model.layers[0]
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, AttentionSpec), "as in GPT-2"
    assert isinstance(mlp, MLPSpec), "as in GPT-2"
    attention = replace(
        attention,
        num_kv_heads=1 if has_one else attention.num_heads,
        qkv_proj=replace(attention.qkv_proj, is_transposed=False),
        out_proj=replace(attention.out_proj, is_transposed=False),
        is_grouped_by_kv_head=True,
    )
    mlp = replace(
        mlp,
        up_proj=replace(mlp.up_proj, is_transposed=False),
        down_proj=replace(mlp.down_proj, is_transposed=False),
    )
    layer = replace(layer, attention=attention, mlp=mlp)
    return replace(model, layers=(layer,) * model.num_layers)


def _attention(config: ConfigReader, hidden: int) -> AttentionSpec:
    heads = config.positive_int("n_head", default=12)
    if hidden % heads:
        raise ModelError(f"config.json: n_embd {hidden} is no multiple of n_head {heads}")
    names = "attn.c_attn", "attn.c_proj"
    attention = sized_attention_spec(heads, hidden // heads, names, True, True, is_transposed=True)
    is_scaled = config.boolean("scale_attn_weights", default=True)
    return attention if is_scaled else replace(attention, scale=1.0)


def _mlp(config: ConfigReader, hidden: int) -> MLPSpec:
    size = config.positive_int("n_inner", default=4 * hidden)
    activation = config.choice("activation_function", ACTIVATIONS, "gelu_new")
    return plain_mlp_spec(size, activation, ("mlp.c_fc", "mlp.c_proj"), is_transposed=True)
