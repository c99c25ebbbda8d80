"""Qwen3, mixtures of experts.

Source: Yang et al., "Qwen3 Technical Report" (2025).
"""

from gllm.models.config_reader import ConfigReader
from gllm.models.families.qwen2_moe import moe_layers, qwen_experts_spec
from gllm.models.families.qwen3 import qwen3_attention_spec
from gllm.models.spec import ModelSpec
from gllm.models.spec_builders import decoder_model


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the spec of Qwen3 MoE: Qwen3 with experts, none of them shared."""
    config.set_defaults(num_key_value_heads=4)
    experts = qwen_experts_spec(config, default=128)
    return decoder_model(config, moe_layers(config, qwen3_attention_spec(config), experts))
