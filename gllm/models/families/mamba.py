"""Mamba, Falcon Mamba and Mamba 2, such as Mamba-Codestral: no layer has attention.

Source: Gu and Dao, "Mamba" (2023), section 3; Zuo et al., "Falcon Mamba" (2024), section 2; Dao and
Gu, "Transformers are SSMs" (2024), section 7; and the configurations published with the models.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import EmbeddingSpec, ModelSpec
from gllm.models.spec.parts import LinearSpec, NormSpec
from gllm.models.spec.recurrent import ConvSpec, HeadVectorSpec, Mamba1Spec, Mamba2Spec
from gllm.models.spec_builders import decoder_model, mamba2_spec

CONTEXT_LENGTH = 1_048_576
"""Longest sequence in tokens: the models have no positions that limit it."""


def build_mamba_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Mamba."""
    return _model(config, _expanded_mamba1_spec(config), tied=True)


def build_falcon_mamba_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Falcon Mamba: Mamba with norms of time steps, keys and queries."""
    eps = config.positive_float("mixer_rms_eps", default=1e-6)
    norm = NormSpec("", "rms", eps, has_weight=False)
    mamba = replace(_expanded_mamba1_spec(config), norms=(norm, norm, norm))
    return _model(config, mamba, tied=True)


def build_mamba2_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Mamba 2."""
    heads = config.positive_int("num_heads", default=128)
    size = config.positive_int("head_dim", default=64)
    inner = config.positive_int("expand", default=2) * config.positive_int("hidden_size")
    config.ignore("intermediate_size", "norm_before_gate", "time_step_rank")
    if heads * size != inner:
        rule = f"expand * hidden_size / num_heads, {inner} / {heads}"
        raise config.error(("head_dim",), rule, size)
    groups = "n_groups", "state_size", "conv_kernel", "use_conv_bias", "use_bias"
    names = (*groups, "layer_norm_epsilon")
    mamba = mamba2_spec(config, "mixer", heads, size, names, (8, 128, 1e-5), "num_heads")
    return _model(config, mamba)


def mamba1_spec(config: ConfigReader, prefix: str, channels: int) -> Mamba1Spec:
    """Build the spec of a Mamba block from config.json.

    Args:
        config: the model's configuration.
        prefix: common prefix of the tensor names.
        channels: number of channels.
    """
    config.require_value("hidden_act", "silu")
    # Of training, and of the library's choice among implementations.
    config.ignore("use_associative_scan", "use_falcon_mambapy", "use_mamba_kernels", "use_mambapy")
    bias = config.boolean("use_bias")
    usual_rank = -(-config.positive_int("hidden_size") // 16)
    return Mamba1Spec(
        num_channels=channels,
        state_size=config.positive_int("state_size", default=16),
        step_rank=config.positive_int_or_auto("time_step_rank", usual_rank),
        in_proj=LinearSpec((f"{prefix}.in_proj",), bias),
        conv=ConvSpec(
            (f"{prefix}.conv1d",),
            config.positive_int("conv_kernel", default=4),
            config.boolean("use_conv_bias", default=True),
        ),
        selection_proj=LinearSpec((f"{prefix}.x_proj",)),
        step_proj=LinearSpec((f"{prefix}.dt_proj",)),
        step_bias=HeadVectorSpec(f"{prefix}.dt_proj.bias"),
        decay=HeadVectorSpec(f"{prefix}.A_log"),
        skip=HeadVectorSpec(f"{prefix}.D"),
        out_proj=LinearSpec((f"{prefix}.out_proj",), bias),
    )


def _expanded_mamba1_spec(config: ConfigReader) -> Mamba1Spec:
    """Build the spec of a block whose channels are intermediate_size, or expand * hidden_size."""
    inner = config.positive_int("expand", default=2) * config.positive_int("hidden_size")
    return mamba1_spec(config, "mixer", config.positive_int("intermediate_size", default=inner))


def _model(config: ConfigReader, mamba: Mamba1Spec | Mamba2Spec, tied: bool = False) -> ModelSpec:
    """Build a model whose layers have no feed-forward block."""
    config.require_value("hidden_act", "silu")
    config.require_value("rms_norm", True)
    config.require_value("ssm_cfg", {})
    config.ignore("rescale_prenorm_residual", "residual_in_fp32", "fused_add_norm")
    config.ignore("d_inner", "d_model", "n_layer", "pad_vocab_size_multiple", "use_mambapy")
    config.ignore("time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_min")
    config.ignore("time_step_scale")
    eps = config.positive_float("layer_norm_epsilon", default=1e-5)
    layer = LayerSpec(mamba, None, NormSpec("norm", "rms", eps), None)
    return decoder_model(
        config,
        [layer] * config.positive_int("num_hidden_layers"),
        tied=tied,
        embedding=EmbeddingSpec("backbone.embeddings"),
        norm=NormSpec("backbone.norm_f", "rms", eps),
        context_length=CONTEXT_LENGTH,
        layer_name_format="backbone.layers.{}",
        renamed_tensors=(("backbone.embedding.", "backbone.embeddings."),),
    )
