"""Phi-3, Phi-3.5 and Phi-4.

Source: Abdin et al., "Phi-3 Technical Report" (2024).
"""

from gllm.models.config_reader import ConfigReader
from gllm.models.spec import ModelSpec
from gllm.models.spec_builders import attention_spec, gated_mlp_spec, sliding_window_model


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Phi-3: Llama with fused projections.

    Some sizes have a sliding window or longrope.
    """
    config.set_defaults(rms_norm_eps=1e-5, original_max_position_embeddings=4096)
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.require_value(name, False)
    for name in ("full_attn_mod", "interpolate_factor"):
        config.require_value(name, 1)
    attention = attention_spec(config, {"partial": 1.0}, names=("qkv_proj", "o_proj"))
    mlp = gated_mlp_spec(config, names=("gate_up_proj", "down_proj"))
    return sliding_window_model(config, attention, mlp)
