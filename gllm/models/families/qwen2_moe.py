"""Qwen1.5 and Qwen2, mixtures of experts.

Source: Yang et al., "Qwen2 Technical Report" (2024), section 2.2.2.
"""

from dataclasses import replace

from gllm.models.describe import attention_of, check_experts, decoder, gated_mlp, pre_norm
from gllm.models.families.qwen2 import qwen_windows
from gllm.models.keys import Keys
from gllm.models.spec import MLP, Attention, Experts, Layer, Linear, Model


def describe(keys: Keys) -> Model:
    """Qwen2 with experts, and a gated block beside them that all tokens share."""
    experts = replace(
        qwen_experts(keys, default=60),
        shared=gated_mlp(
            keys, "mlp.shared_expert", keys.count("shared_expert_intermediate_size", default=5632)
        ),
        shared_gate=Linear(("mlp.shared_expert_gate",)),
    )
    attention = attention_of(keys, qkv_bias=keys.flag("qkv_bias", default=True))
    return decoder(keys, sparse_layers(keys, attention, experts))


def qwen_experts(keys: Keys, default: int) -> Experts:
    """The routed experts, `default` of them where the file does not say."""
    return check_experts(
        Experts(
            count=keys.count("num_experts", "num_local_experts", default=default),
            active=keys.count("num_experts_per_tok"),
            router=Linear(("mlp.gate",)),
            expert=gated_mlp(keys, "mlp.experts.{}", keys.count("moe_intermediate_size")),
            normalize=keys.flag("norm_topk_prob"),
        )
    )


def sparse_layers(keys: Keys, attention: Attention, experts: Experts) -> list[Layer]:
    """Experts in every decoder_sparse_step-th layer but those of mlp_only_layers."""
    keys.only("use_sliding_window", False)
    dense = gated_mlp(keys)
    step = keys.count("decoder_sparse_step", default=1)
    dense_layers = keys.get("mlp_only_layers", default=[])
    if not isinstance(dense_layers, list) or not all(type(one) is int for one in dense_layers):
        raise keys.error(("mlp_only_layers",), "a list of layers' numbers", dense_layers)
    blocks: list[MLP | Experts] = []
    for layer in range(len(qwen_windows(keys))):
        is_sparse = layer not in dense_layers and (layer + 1) % step == 0
        blocks.append(experts if is_sparse else dense)
    return [pre_norm(keys, attention, block) for block in blocks]
