"""Apertus.

Source: Project Apertus, "Apertus" (2025), section 2.1.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    plain_mlp_spec,
    rms_norm_spec,
    with_head_norms,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Apertus: normalized heads, an MLP with xIELU and no gate."""
    config.set_defaults(
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 12_000_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        rope_theta=12_000_000.0,
    )
    config.require_value("qk_norm", True)
    config.require_value("post_norm", False)
    bias = config.boolean("attention_bias")
    attention = with_head_norms(config, attention_spec(config, None, bias, bias))
    mlp = plain_mlp_spec(
        config.positive_int("intermediate_size"),
        config.choice("hidden_act", {"xielu": "xielu"}, "xielu"),
        ("mlp.up_proj", "mlp.down_proj"),
        bias=False,
    )
    layer = LayerSpec(
        attention,
        replace(mlp, activation_weights=("mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n")),
        rms_norm_spec(config, "attention_layernorm"),
        rms_norm_spec(config, "feedforward_layernorm"),
    )
    count = config.positive_int("num_hidden_layers")
    # Constants of the activation, the same in all layers.
    return decoder_model(config, [layer] * count, ignored_tensors=(r".*\.act_fn\.(beta|eps)",))
