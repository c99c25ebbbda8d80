"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 of NVIDIA: one block per layer.

A layer is a Mamba 2 block, attention without positions, an MLP or experts. Source: NVIDIA,
"Nemotron-H: A Family of Accurate and Efficient Hybrid Mamba-Transformer Models" (2025), section 2,
and the configurations published with the models.
"""

import math
from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import experts_spec
from gllm.models.spec.feed_forward import ExpertsSpec, MLPSpec
from gllm.models.spec.layer import LayerSpec, NoMixerSpec
from gllm.models.spec.model import EmbeddingSpec, ModelSpec
from gllm.models.spec_builders import (
    ACTIVATIONS,
    attention_spec,
    decoder_model,
    mamba2_spec,
    plain_mlp_spec,
    read_layer_types,
    rms_norm_spec,
)

TYPES = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letters of hybrid_override_pattern, and the entries of layers_block_type that they mean."""


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Nemotron-H."""
    config.set_defaults(
        head_dim=128, num_key_value_heads=8, max_position_embeddings=4096, hidden_size=4096
    )
    for key in ("use_bias", "mamba_proj_bias", "attention_bias"):
        config.require_value(key, False)
    config.require_value("mamba_hidden_act", "silu")
    keys = "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias", "use_bias"
    mamba = mamba2_spec(
        config,
        "mixer",
        config.positive_int("mamba_num_heads", default=128),
        config.positive_int("mamba_head_dim", default=64),
        (*keys, "layer_norm_epsilon"),
        (8, 128, 1e-5),
        "mamba_num_heads",
    )
    # As transformers' prefill; its decodes have no limit.
    smallest = config.positive_float("time_step_min", default=0.001)
    mamba = replace(mamba, min_step=smallest, max_step=math.inf)
    attention = replace(attention_spec(config, prefix="mixer"), rope=None)
    norm = rms_norm_spec(config, "norm", "layer_norm_epsilon", 1e-5)
    types = _read_types(config)
    layers = {
        "linear_attention": LayerSpec(mamba, None, norm, None),
        "full_attention": LayerSpec(attention, None, norm, None),
    }
    if "mlp" in types:
        size = config.positive_int("intermediate_size", default=21504)
        layers["mlp"] = LayerSpec(NoMixerSpec(), _mlp_spec(config, "mixer", size), norm, None)
    if "moe" in types:
        layers["moe"] = LayerSpec(NoMixerSpec(), _experts_spec(config), norm, None)
    _ignore_unused(config)
    return decoder_model(
        config,
        [layers[kind] for kind in types],
        embedding=EmbeddingSpec("backbone.embeddings"),
        norm=replace(norm, name="backbone.norm_f"),
        layer_name_format="backbone.layers.{}",
        ignored_tensors=(r"mtp\..*",),
    )


def _ignore_unused(config: ConfigReader) -> None:
    """Accept keys of training, speed, multi-token prediction and of blocks that no layer has."""
    config.ignore("expand", "mamba_ssm_cache_dtype", "n_shared_experts", "num_logits_to_keep")
    config.ignore("num_query_groups", "moe_shared_expert_overlap", "num_hidden_layers")
    config.ignore("rescale_prenorm_residual", "residual_in_fp32", "rms_norm_eps")
    config.ignore("use_mamba_kernels", "time_step_floor", "time_step_max", "time_step_limit")
    config.ignore("time_step_rank", "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    config.ignore("num_nextn_predict_layers", "intermediate_size", "moe_intermediate_size")
    config.ignore("moe_shared_expert_intermediate_size", "n_routed_experts", "norm_topk_prob")
    config.ignore("num_experts_per_tok", "routed_scaling_factor", "n_group", "topk_group")
    config.ignore("mlp_hidden_act", "mlp_bias")


def _read_types(config: ConfigReader) -> list[str]:
    """Return the type of each layer: layers_block_type, or the letters of older files."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and set(pattern) <= set(TYPES):
        letters = [TYPES[letter] for letter in pattern]
        return read_layer_types(config, list(TYPES.values()), letters)
    if pattern is not None:
        rule = f"a text of {' '.join(TYPES)}"
        raise config.error(("hybrid_override_pattern",), rule, pattern)
    default = ["linear_attention", "moe", "full_attention", "mlp"]
    types = config.get("layer_types", "layers_block_type", default=default)
    count = len(types) if isinstance(types, list) else 1
    return read_layer_types(config, list(TYPES.values()), default if count == 4 else types)


def _mlp_spec(config: ConfigReader, prefix: str, size: int) -> MLPSpec:
    """Build an MLP without a gate."""
    activation = config.choice("mlp_hidden_act", ACTIVATIONS | {"relu2": "relu2"}, "relu2")
    names = f"{prefix}.up_proj", f"{prefix}.down_proj"
    return plain_mlp_spec(size, activation, names, bias=config.boolean("mlp_bias"))


def _experts_spec(config: ConfigReader) -> ExpertsSpec:
    """Build experts and a shared expert without gates, selected as in DeepSeek V3."""
    config.require_value("moe_latent_size", None)
    inner = config.positive_int("moe_intermediate_size", default=7688)
    shared = config.positive_int("moe_shared_expert_intermediate_size", default=7688)
    return experts_spec(
        config,
        "mixer.gate",
        _mlp_spec(config, "mixer.experts.{}", inner),
        defaults=(8, 2),
        keys=("n_routed_experts",),
        scoring="sigmoid",
        renormalize=config.boolean("norm_topk_prob", default=True),
        scaling_factor=config.positive_float("routed_scaling_factor", default=1.0),
        num_groups=config.positive_int("n_group", default=1),
        top_k_groups=config.positive_int("topk_group", default=1),
        group_scoring="best two",
        correction_bias="mixer.gate.e_score_correction_bias",
        shared_expert=_mlp_spec(config, "mixer.shared_experts", shared),
    )
