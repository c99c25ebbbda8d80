"""MiniMax Text-01, M1 and M2.

Source: MiniMax, "MiniMax-01" (2025), section 2; "MiniMax-M2" (2025),
https://github.com/MiniMax-AI/MiniMax-M2; and the configurations published with the models.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import experts_spec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import LinearSpec, NormSpec
from gllm.models.spec.recurrent import LightningSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    pre_norm_layer,
    read_layer_types,
    with_head_norms,
)

TYPES = "linear_attention", "full_attention"
"""Entries of layer_types, by their numbers in attn_type_list."""
FACTORS = {
    "linear_attention": ("linear_attn", "linear_attention"),
    "full_attention": ("full_attn", "full_attention"),
    "mlp": ("mlp", "mlp"),
}
"""Parts of the keys of factors in transformers' and in MiniMax's own files."""


def build_text01_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of MiniMax Text-01 and M1: lightning attention, experts.

    Norms replace the residual stream, with a factor of their own.
    """
    config.set_defaults(
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
        max_position_embeddings=131_072,
    )
    config.require_value("postnorm", True)
    config.require_value("shared_intermediate_size", 0)
    config.require_value("sliding_window", None)
    config.ignore("block_size", "shared_moe_mode")
    attention = attention_spec(config, {"partial": _read_rotated_share(config)})
    experts = experts_spec(
        config,
        "block_sparse_moe.gate",
        gated_mlp_spec(config, "block_sparse_moe.experts.{}", names=("w1", "w3", "w2")),
        defaults=(8, 2),
        keys=("num_local_experts",),
        renormalize=True,
    )
    count, factors = config.positive_int("num_hidden_layers"), _read_factors(config)
    numbers = config.get("attn_type_list", default=[(index + 1) % 2 for index in range(count)])
    is_list = isinstance(numbers, list) and len(numbers) == count
    if not is_list or not all(type(number) is int and number in (0, 1) for number in numbers):
        raise config.error(("attn_type_list",), f"a list of {count} numbers 0 or 1", numbers)
    types = read_layer_types(config, TYPES, [TYPES[number] for number in numbers])
    layers = []
    for index, kind in enumerate(types):
        # Decays are faster in the first layers.
        speed = 1 - index / (count - 1 + 1e-5) + 1e-5
        lightning = _lightning_spec(attention.num_heads, attention.head_dim, speed)
        layer = pre_norm_layer(config, lightning if kind == TYPES[0] else attention, experts)
        stream = factors[kind][0], factors["mlp"][0]
        layers.append(replace(layer, stream_factors=stream, residual_scale=factors["mlp"][1]))
    decays = r".*\.self_attn\.(slope_rate|(query|key|diagonal)_decay)"
    return decoder_model(config, layers, ignored_tensors=(decays,))


def _lightning_spec(heads: int, head_dim: int, speed: float) -> LightningSpec:
    """Build lightning attention; speed: factor of the slopes, which are those of ALiBi."""
    return LightningSpec(
        num_heads=heads,
        head_dim=head_dim,
        qkv_proj=LinearSpec(("self_attn.qkv_proj",)),
        gate_proj=LinearSpec(("self_attn.output_gate",)),
        norm=NormSpec("self_attn.norm", "rms", 1e-6),
        out_proj=LinearSpec(("self_attn.out_proj",)),
        slopes=tuple(speed * 2 ** (-8 / heads * (head + 1)) for head in range(heads)),
    )


def _read_factors(config: ConfigReader) -> dict[str, tuple[float, float]]:
    """Return the factors of norms (alpha) and of outputs (beta), which all blocks share."""
    factors = {}
    for name, (new, old) in FACTORS.items():
        alpha, beta = (
            config.positive_float(f"{new}_{each}_factor", f"layernorm_{old}_{each}", default=1.0)
            for each in ("alpha", "beta")
        )
        factors[name] = alpha, beta
    if len({beta for _, beta in factors.values()}) > 1:
        keys = ("mlp_beta_factor", "layernorm_mlp_beta")
        rule = "the factor of attention's outputs too"
        raise config.error(keys, rule, factors["mlp"][1])
    return factors


def _read_rotated_share(config: ConfigReader) -> float:
    """Return the share of a head's elements that are rotated."""
    usual = config.positive_int("hidden_size") // config.positive_int("num_attention_heads")
    head_dim = config.positive_int("head_dim", default=usual)
    turned = config.positive_int("rotary_dim", default=head_dim)
    if turned > head_dim:
        raise config.error(("rotary_dim",), f"at most head_dim {head_dim}", turned)
    return turned / head_dim


def build_m2_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of MiniMax M2: experts, and norms of all queries and keys of a token."""
    config.set_defaults(head_dim=128, num_key_value_heads=8, rope_theta=5_000_000.0)
    count = config.positive_int("num_hidden_layers")
    config.require_value("attn_type_list", [1] * count)
    config.require_value("qk_norm_type", "per_layer")
    config.require_value("scoring_func", "sigmoid")
    config.require_value("shared_intermediate_size", 0)
    for name in ("use_qk_norm", "use_routing_bias"):
        config.require_value(name, True)
    # Of linear attention, shared and dense blocks, which M2 does not have, and of prediction heads.
    config.ignore("layernorm_full_attention_beta", "layernorm_linear_attention_beta")
    config.ignore("layernorm_mlp_beta", "mlp_intermediate_size", "shared_moe_mode")
    config.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    attention = attention_spec(config, {"partial": _read_rotated_share(config)})
    attention = with_head_norms(config, attention)
    experts = experts_spec(
        config,
        "block_sparse_moe.gate",
        gated_mlp_spec(config, "block_sparse_moe.experts.{}", names=("w1", "w3", "w2")),
        defaults=(256, 8),
        keys=("num_local_experts",),
        scoring="sigmoid",
        renormalize=True,
        correction_bias="block_sparse_moe.e_score_correction_bias",
    )
    attention = replace(attention, has_projection_norm=True)
    layer = pre_norm_layer(config, attention, experts)
    return decoder_model(config, [layer] * count)
