"""ERNIE 4.5, dense and with experts.

Source: Baidu ERNIE Team, "ERNIE 4.5 Technical Report" (2025), section 2.
"""

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import experts_spec
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import attention_spec, decoder_model, gated_mlp_spec, pre_norm_layer


def build_ernie_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of ERNIE 4.5: Llama with interleaved rotary pairs."""
    config.set_defaults(head_dim=128, rms_norm_eps=1e-5, rope_theta=500_000.0)
    attention, bias = _attention(config), config.boolean("use_bias")
    layer = pre_norm_layer(config, attention, gated_mlp_spec(config, bias=bias))
    return decoder_model(config, [layer] * config.positive_int("num_hidden_layers"), tied=True)


def build_ernie_moe_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of ERNIE 4.5 with experts, which a bias balances, and shared experts."""
    config.set_defaults(num_key_value_heads=4, rms_norm_eps=1e-5, rope_theta=500_000.0)
    # Training of the router; the smallest divisor of weights, far below any sum of them.
    config.ignore("moe_capacity", "moe_use_aux_free", "moe_norm_min", "num_nextn_predict_layers")
    config.require_value("moe_gate", "topk")
    attention, bias = _attention(config), config.boolean("use_bias")
    size = config.positive_int("moe_intermediate_size", default=1536)
    shared = size * config.non_negative_int("moe_num_shared_experts", default=2)
    config.rename(num_experts_per_tok=("moe_k", "num_experts_per_tok"))
    experts = experts_spec(
        config,
        "mlp.gate",
        gated_mlp_spec(config, "mlp.experts.{}", size, bias),
        defaults=(64, 6),
        keys=("moe_num_experts", "num_experts"),
        renormalize=True,
        correction_bias="mlp.moe_statics.e_score_correction_bias",
        has_correction_row=True,
        shared_expert=gated_mlp_spec(config, "mlp.shared_experts", shared, bias)
        if shared
        else None,
    )
    sparse = pre_norm_layer(config, attention, experts)
    dense = pre_norm_layer(config, attention, gated_mlp_spec(config, bias=bias))
    count = config.positive_int("num_hidden_layers")
    interval = config.positive_int("moe_layer_interval", default=1)
    begin = config.non_negative_int("moe_layer_start_index", default=1)
    last = config.get("moe_layer_end_index", default=-1)
    if type(last) is not int or not last >= -1:
        raise config.error(("moe_layer_end_index",), "-1 or a layer's index", last)
    end = count if last == -1 else last + 1
    layers = [
        sparse if begin <= layer < end and (layer + 1) % interval == 0 else dense
        for layer in range(count)
    ]
    return decoder_model(config, layers, tied=True, ignored_tensors=(r"model\.mtp_.*",))


def _attention(config: ConfigReader) -> AttentionSpec:
    config.require_value("compression_ratio", 1.0)
    bias = config.boolean("use_bias")
    return attention_spec(config, {"interleaved": True}, bias, bias)
