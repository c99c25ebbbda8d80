"""Bamba of IBM: Mamba 2 in most layers, attention with half of each head rotated in the others.

Source: IBM, "Bamba: Inference-Efficient Hybrid Mamba2 Model" (2024), and the configurations
published with the models.
"""

from gllm.models.config_reader import ConfigReader
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    expanded_mamba2_spec,
    gated_mlp_spec,
    rms_norm_spec,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Bamba."""
    config.set_defaults(num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=262_144)
    config.ignore("num_logits_to_keep", "use_mamba_kernels", "z_loss_coefficient")
    bias = config.boolean("attention_bias")
    attention = attention_spec(config, {"partial": 0.5}, qkv_bias=bias, out_bias=bias)
    config.require_value("attn_rotary_emb", attention.head_dim // 2)
    count = config.positive_int("num_hidden_layers")
    attends = config.get("attn_layer_indices", default=[])
    is_list = isinstance(attends, list)
    if not is_list or not all(type(index) is int and 0 <= index < count for index in attends):
        rule = f"a list of layers' numbers below {count}"
        raise config.error(("attn_layer_indices",), rule, attends)
    mamba = expanded_mamba2_spec(config)
    mlp = gated_mlp_spec(config, "feed_forward", bias=config.boolean("mlp_bias"))
    norm = rms_norm_spec(config, "input_layernorm")
    mlp_norm = rms_norm_spec(config, "pre_ff_layernorm")
    layers = [
        LayerSpec(attention if index in attends else mamba, mlp, norm, mlp_norm)
        for index in range(count)
    ]
    return decoder_model(config, layers, norm=rms_norm_spec(config, "model.final_layernorm"))
