"""Phi-1, Phi-1.5 and Phi-2.

Source: Li et al., "Textbooks Are All You Need II" (2023), section 2.1.
"""

from gllm.models.config_reader import ConfigReader
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import (
    ACTIVATIONS,
    attention_spec,
    decoder_model,
    layer_norm_spec,
    plain_mlp_spec,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Phi: parallel layers with one norm, heads rotated in part."""
    config.require_value("qk_layernorm", False)
    names = "q_proj", "k_proj", "v_proj", "dense"
    activation = config.choice("hidden_act", ACTIVATIONS, "gelu_new")
    size = config.positive_int("intermediate_size")
    layer = LayerSpec(
        attention_spec(config, {"partial": 0.5}, True, True, names),
        plain_mlp_spec(size, activation, ("mlp.fc1", "mlp.fc2")),
        layer_norm_spec(config, "input_layernorm", "layer_norm_eps"),
        mlp_norm=None,
        is_parallel=True,
    )
    return decoder_model(
        config,
        [layer] * config.positive_int("num_hidden_layers"),
        norm=layer_norm_spec(config, "model.final_layernorm", "layer_norm_eps"),
        head={"has_bias": True},
    )
