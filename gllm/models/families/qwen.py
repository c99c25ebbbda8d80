"""Qwen, the first release.

Source: Bai et al., "Qwen Technical Report" (2023), section 2.3, and the configurations published
with the models.
"""

from dataclasses import replace
from functools import partial

from gllm.models.config_reader import ConfigReader
from gllm.models.errors import ModelError
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.model import EmbeddingSpec, ModelSpec
from gllm.models.spec.parts import RopeSpec
from gllm.models.spec_builders import (
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
    rms_norm_spec,
    sized_attention_spec,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Qwen (1): one tensor with biases for queries, keys and values.

    Dynamic NTK scaling and log-n attention change only sequences longer than `seq_length` and are
    not implemented. The context therefore ends at `seq_length` if either is on.
    """
    _check(config)
    bias = not config.boolean("no_bias", default=True)
    width = config.positive_int("intermediate_size")
    if width % 2:
        raise config.error(("intermediate_size",), "even: gate and up projection share it", width)
    mlp = gated_mlp_spec(config, "mlp", width // 2, bias, names=("w2", "w1", "c_proj"))
    norm = partial(rms_norm_spec, eps="layer_norm_epsilon")
    layer = pre_norm_layer(config, _attention(config, bias), mlp, norm, ("ln_1", "ln_2"))
    context = _context_length(config)
    model = decoder_model(
        config,
        [layer] * config.positive_int("num_hidden_layers"),
        root="transformer.",
        embedding=EmbeddingSpec("transformer.wte"),
        norm=norm(config, "transformer.ln_f"),
        context_length=context,
        layer_name_format="transformer.h.{}",
    )
    longest = config.positive_int("max_position_embeddings")
    if context >= longest:
        return model
    note = (
        f"config.json: texts end at seq_length {context}; dynamic NTK scaling and log-n attention, "
        f"which extend them to {longest} tokens, are not implemented"
    )
    return replace(model, notes=(note,))


def _context_length(config: ConfigReader) -> int:
    """Return the length in tokens up to which attention is the usual one."""
    flags = [config.boolean(name, default=True) for name in ("use_dynamic_ntk", "use_logn_attn")]
    if any(flags):
        return config.positive_int("seq_length")
    config.ignore("seq_length")
    return config.positive_int("max_position_embeddings")


def _attention(config: ConfigReader, bias: bool) -> AttentionSpec:
    heads, hidden = config.positive_int("num_attention_heads"), config.positive_int("hidden_size")
    head_dim = config.positive_int("kv_channels", default=128)
    if heads * head_dim != hidden:
        raise ModelError(
            f"config.json: num_attention_heads {heads} times kv_channels {head_dim} is not "
            f"hidden_size {hidden}"
        )
    if head_dim % 2:
        raise config.error(("kv_channels",), "even: pairs are rotated", head_dim)
    theta = config.positive_float("rotary_emb_base", default=10_000.0)
    if theta < 1:
        raise config.error(("rotary_emb_base",), "a finite number from 1 on", theta)
    rope, names = RopeSpec(head_dim, theta=theta), ("attn.c_attn", "attn.c_proj")
    return sized_attention_spec(heads, head_dim, names, qkv_bias=True, out_bias=bias, rope=rope)


def _check(config: ConfigReader) -> None:
    """Raise ModelError for unsupported variants; ignore keys of training, speed and precision."""
    config.require_value("rotary_pct", 1)
    config.require_value("scale_attn_weights", True)
    config.require_value("use_cache_quantization", False)
    config.ignore("attn_dropout_prob", "emb_dropout_prob", "tokenizer_type")
    config.ignore("bf16", "fp16", "fp32", "softmax_in_fp32")
    config.ignore("onnx_safe", "use_cache_kernel", "use_flash_attn")
