"""gpt-oss.

Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (2025), section 2.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import experts_spec
from gllm.models.spec.feed_forward import ExpertStacksSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import LinearSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    read_layer_windows,
    windowed_layers,
)

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Rope scaling of a file that has none."""


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of gpt-oss: attention with sinks, experts with biases, clamped SwiGLU."""
    config.set_defaults(
        num_key_value_heads=8,
        head_dim=64,
        attention_bias=True,
        sliding_window=128,
        rms_norm_eps=1e-5,
        rope_parameters=YARN,
        rope_theta=150_000.0,
    )
    config.require_value("hidden_act", "silu")
    config.require_value("swiglu_alpha", 1.702)
    config.require_value("swiglu_limit", 7.0)
    config.ignore("experts_per_token", "initial_context_length")
    bias = config.boolean("attention_bias")
    attention = replace(
        attention_spec(config, qkv_bias=bias, out_bias=bias), sinks="self_attn.sinks"
    )
    stacks = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    experts = experts_spec(
        config,
        "mlp.router",
        replace(gated_mlp_spec(config, "mlp.experts.{}", bias=True), activation="swiglu_oai"),
        defaults=(128, 4),
        keys=("num_local_experts",),
        renormalize=True,
        stacks=ExpertStacksSpec(*stacks, is_transposed=True, is_interleaved=True),
    )
    experts = replace(experts, router=LinearSpec(("mlp.router",), has_bias=True))
    windows = read_layer_windows(
        config, [layer % 2 == 0 for layer in range(config.positive_int("num_hidden_layers"))]
    )
    return decoder_model(config, windowed_layers(config, attention, experts, windows))
