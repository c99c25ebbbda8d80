"""StarCoder 2.

Source: Lozhkov et al., "StarCoder 2 and The Stack v2" (2024), section 6.
"""

from functools import partial

from gllm.models.config_reader import ConfigReader
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import NormSpec
from gllm.models.spec_builders import (
    ACTIVATIONS,
    attention_spec,
    decoder_model,
    layer_norm_spec,
    plain_mlp_spec,
    pre_norm_layer,
    read_layer_windows,
    windowed_layers,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of StarCoder 2: LayerNorm, an MLP without a gate, and a window."""
    config.set_defaults(num_key_value_heads=2)
    for name in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        config.require_value(name, True)
    config.require_value("scale_attn_weights", True)
    config.require_value("mlp_type", "default")
    config.require_value("norm_type", "layer_norm")
    config.ignore(
        "activation_function", "embedding_dropout", "layer_norm_epsilon", "residual_dropout"
    )
    bias = config.boolean("use_bias", default=True)
    activation = config.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh")
    size = config.positive_int("intermediate_size")
    mlp = plain_mlp_spec(size, activation, ("mlp.c_fc", "mlp.c_proj"), bias)
    attention = attention_spec(config, qkv_bias=bias, out_bias=bias)
    windows = read_layer_windows(config, [True] * config.positive_int("num_hidden_layers"))
    layer = partial(pre_norm_layer, norm=_norm)
    layers = windowed_layers(config, attention, mlp, windows, layer=layer)
    return decoder_model(config, layers, tied=True, norm=_norm(config, "model.norm"))


def _norm(config: ConfigReader, name: str) -> NormSpec:
    return layer_norm_spec(config, name, "norm_epsilon")
