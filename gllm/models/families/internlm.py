"""InternLM 2 and 3.

Source: Cai et al., "InternLM2 Technical Report" (2024), section 2.2; the configuration and the code
published with InternLM 3.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.spec.model import EmbeddingSpec, ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
)


def build_internlm2_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of InternLM 2: Llama with one tensor stored KV head by KV head."""
    config.set_defaults(num_key_value_heads=None)
    bias = config.boolean("bias")
    attention = attention_spec(config, None, bias, bias, ("wqkv", "wo"), "attention")
    attention = replace(attention, is_grouped_by_kv_head=True)
    mlp = gated_mlp_spec(config, "feed_forward", names=("w1", "w3", "w2"))
    layer = pre_norm_layer(config, attention, mlp, names=("attention_norm", "ffn_norm"))
    return decoder_model(
        config,
        [layer] * config.positive_int("num_hidden_layers"),
        embedding=EmbeddingSpec("model.tok_embeddings"),
        head={"untied_name": "output"},
    )


def build_internlm3_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of InternLM 3: Llama with a switch for the biases of q, k and v."""
    config.set_defaults(head_dim=128, num_key_value_heads=2, rms_norm_eps=1e-5)
    bias = config.boolean("bias", "mlp_bias")
    qkv_bias = config.boolean("qkv_bias", "attention_bias")
    attention = attention_spec(config, qkv_bias=qkv_bias, out_bias=bias)
    layer = pre_norm_layer(config, attention, gated_mlp_spec(config, bias=bias))
    return decoder_model(config, [layer] * config.positive_int("num_hidden_layers"))
