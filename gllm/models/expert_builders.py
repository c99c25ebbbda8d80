"""Spec builders of mixtures of experts that many families share, with the keys most of them use."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gllm.models.config_reader import ConfigReader
from gllm.models.spec.attention import AttentionSpec, LatentAttentionSpec
from gllm.models.spec.feed_forward import ExpertsSpec, MLPSpec
from gllm.models.spec.model import ModelSpec, PredictionHeadSpec
from gllm.models.spec.parts import LinearSpec
from gllm.models.spec_builders import (
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
    rms_norm_spec,
)


def experts_spec(
    config: ConfigReader,
    router: str,
    expert: MLPSpec,
    defaults: tuple[int | None, int | None] = (None, None),
    keys: Sequence[str] = ("num_experts", "num_local_experts"),
    **fields: Any,
) -> ExpertsSpec:
    """Build the spec of a mixture of experts, whose numbers are read from config.json.

    Args:
        config: the model's configuration.
        router: tensor name of the router.
        expert: each expert; tensor names have {} in place of its index.
        defaults: number of experts and experts per token without the keys; None if they must be
            set.
        keys: keys of the number of experts, of which the first that is set is read.
        fields: further fields of ExpertsSpec; `top_k` replaces the key `num_experts_per_tok`.

    Raises:
        ModelError: numbers of experts, groups and selected experts do not fit together.
    """
    if "top_k" not in fields:
        fields["top_k"] = config.positive_int("num_experts_per_tok", default=defaults[1])
    num_experts = config.positive_int(*keys, default=defaults[0])
    linear = LinearSpec((router,))
    experts = ExpertsSpec(num_experts=num_experts, router=linear, expert=expert, **fields)
    _check_experts(config, experts, keys)
    return experts


def _check_experts(config: ConfigReader, experts: ExpertsSpec, keys: Sequence[str]) -> None:
    """Raise ModelError unless the numbers of experts, groups and selected experts fit together."""
    total, groups, selected = experts.num_experts, experts.num_groups, experts.top_k_groups
    size = total // groups
    limit = 1 if experts.weighs_inputs else selected * size
    minimum = 2 if experts.group_scoring == "best two" and groups > 1 else 1
    rules = (
        ("n_group", groups, total % groups == 0, f"a divisor of the {total} experts"),
        ("n_group", groups, size >= minimum, f"such that groups have {minimum} or more experts"),
        ("topk_group", selected, selected <= groups, f"at most n_group {groups}"),
        (
            "num_experts_per_tok",
            experts.top_k,
            experts.top_k <= limit,
            f"at most {limit}, the experts to select from, as {config.key(*keys)} is {total}",
        ),
    )
    for name, value, is_met, rule in rules:
        if not is_met:
            raise config.error((name,), rule, value)


def qwen_experts_spec(config: ConfigReader, default: int) -> ExpertsSpec:
    """Build the routed experts; `default` is their number without the key."""
    size = config.positive_int("moe_intermediate_size")
    return experts_spec(
        config,
        "mlp.gate",
        gated_mlp_spec(config, "mlp.experts.{}", size),
        defaults=(default, None),
        renormalize=config.boolean("norm_topk_prob"),
    )


def with_shared_expert(config: ConfigReader, experts: ExpertsSpec, default: int) -> ExpertsSpec:
    """Add the gated shared expert; `default` is its size without the key."""
    size = config.positive_int("shared_expert_intermediate_size", default=default)
    return replace(
        experts,
        shared_expert=gated_mlp_spec(config, "mlp.shared_expert", size),
        shared_expert_gate=LinearSpec(("mlp.shared_expert_gate",)),
    )


def sparse_blocks(
    config: ConfigReader, experts: ExpertsSpec, num_layers: int, dense_layers: Sequence[int] = ()
) -> list[MLPSpec | ExpertsSpec]:
    """Return each layer's block: experts in every decoder_sparse_step-th, not mlp_only_layers.

    dense_layers: the latter without the key.
    """
    dense = gated_mlp_spec(config)
    step = config.positive_int("decoder_sparse_step", default=1)
    listed = config.get("mlp_only_layers", default=[*dense_layers])
    if not isinstance(listed, list) or not all(type(one) is int for one in listed):
        raise config.error(("mlp_only_layers",), "a list of layers' numbers", listed)
    return [
        experts if layer not in listed and (layer + 1) % step == 0 else dense
        for layer in range(num_layers)
    ]


def deepseek_experts_spec(
    config: ConfigReader, groups: tuple[int, int], **options: Any
) -> ExpertsSpec:
    """Build routed and shared experts, whose numbers have DeepSeek's keys.

    Args:
        config: the model's configuration.
        groups: number of groups of experts, and of those that a token selects experts from.
        options: further fields of ExpertsSpec.
    """
    inner = config.positive_int("moe_intermediate_size")
    shared = config.non_negative_int("n_shared_experts", "num_shared_experts", default=0)
    return experts_spec(
        config,
        "mlp.gate",
        gated_mlp_spec(config, "mlp.experts.{}", inner),
        keys=("n_routed_experts", "num_experts", "num_local_experts"),
        scaling_factor=config.positive_float("routed_scaling_factor", default=1.0),
        num_groups=groups[0],
        top_k_groups=groups[1],
        shared_expert=gated_mlp_spec(config, "mlp.shared_experts", inner * shared)
        if shared
        else None,
        **options,
    )


def v3_experts_spec(config: ConfigReader) -> ExpertsSpec:
    """Build the experts of DeepSeek V3: sigmoid routing with a correction bias, limited to groups.

    Their number is `n_routed_experts` or `num_experts`.
    """
    config.require_value("topk_method", "noaux_tc")
    # dots.llm1 has the name of the routing under both keys.
    config.require_value("scoring_func", "sigmoid", "noaux_tc")
    return deepseek_experts_spec(
        config,
        (config.positive_int("n_group", default=1), config.positive_int("topk_group", default=1)),
        scoring="sigmoid",
        renormalize=config.boolean("norm_topk_prob"),
        group_scoring="best two",
        correction_bias="mlp.gate.e_score_correction_bias",
    )


def read_sparse_layers(config: ConfigReader) -> list[bool]:
    """Return whether each layer has experts: all but the first_k_dense_replace first ones.

    `mlp_layer_types` has a name for each layer instead.
    """
    config.require_value("moe_layer_freq", 1)
    count = config.positive_int("num_hidden_layers")
    usual_first = config.default_of("first_k_dense_replace", 0)
    first = config.non_negative_int("first_k_dense_replace", default=usual_first)
    usual = ["dense" if layer < first else "sparse" for layer in range(count)]
    types = config.get("mlp_layer_types", default=usual)
    is_list = isinstance(types, list) and set(map(str, types)) <= {"dense", "sparse"}
    if not is_list or len(types) != count:
        raise config.error(("mlp_layer_types",), f"a list of {count} of dense, sparse", types)
    return [each == "sparse" for each in types]


def moe_model(
    config: ConfigReader, attention: AttentionSpec | LatentAttentionSpec, experts: ExpertsSpec
) -> ModelSpec:
    """Build a model whose first layers are dense, with the prediction head if it has one."""
    config.require_value("mlp_bias", False)
    block = gated_mlp_spec(config)
    layers = [
        pre_norm_layer(config, attention, experts if is_sparse else block)
        for is_sparse in read_sparse_layers(config)
    ]
    further = config.non_negative_int("num_nextn_predict_layers", "num_mtp_layers", default=0)
    head = deepseek_prediction_head(config, attention, experts) if further else None
    return decoder_model(config, layers, num_prediction_layers=further, prediction_head=head)


def deepseek_prediction_head(
    config: ConfigReader, attention: AttentionSpec | LatentAttentionSpec, experts: ExpertsSpec
) -> PredictionHeadSpec:
    """Build the multi-token prediction head of DeepSeek V3: a layer with experts."""
    return PredictionHeadSpec(
        config.positive_int("hidden_size"),
        pre_norm_layer(config, attention, experts),
        embedding_norm=rms_norm_spec(config, "enorm"),
        hidden_norm=rms_norm_spec(config, "hnorm"),
        projection=LinearSpec(("eh_proj",)),
        norm=rms_norm_spec(config, "shared_head.norm"),
        copied_tensors=("embed_tokens", "shared_head.head"),
    )
