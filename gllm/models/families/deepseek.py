"""DeepSeek MoE (V1), V2, V3 with R1, V3.2, and Youtu-LLM, which has their attention.

Source: Dai et al., "DeepSeekMoE" (2024), section 3; DeepSeek-AI, "DeepSeek-V2" (2024), section 2;
"DeepSeek-V3 Technical Report" (2024), section 2.1; "DeepSeek-V3.2" (2025), section 2.1.
"""

from collections.abc import Sequence
from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.expert_builders import deepseek_experts_spec, moe_model, v3_experts_spec
from gllm.models.spec.attention import IndexerSpec, LatentAttentionSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import LinearSpec, NormSpec
from gllm.models.spec_builders import (
    attention_spec,
    decoder_model,
    gated_mlp_spec,
    latent_attention_spec,
    pre_norm_layer,
)


def build_v1_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of DeepSeek MoE: softmax routing, shared experts, Llama's attention."""
    config.require_value("scoring_func", "softmax")
    config.require_value("routed_scaling_factor", 1)
    config.require_value("attention_bias", False)
    # With one expert per token its weight is not divided by itself.
    renormalize = (
        config.boolean("norm_topk_prob") and config.positive_int("num_experts_per_tok") > 1
    )
    experts = deepseek_experts_spec(config, (1, 1), renormalize=renormalize)
    return moe_model(config, attention_spec(config), experts)


def build_v2_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of DeepSeek V2: MLA and softmax routing.

    In the larger size, routing is limited to groups of experts.
    """
    config.set_defaults(n_shared_experts=2, q_lora_rank=1536)
    limits = {"greedy": False, "group_limited_greedy": True}
    limited = config.choice("topk_method", limits, "greedy")
    config.require_value("scoring_func", "softmax")
    config.require_value("norm_topk_prob", False)
    config.require_value("attention_bias", False)
    groups = config.positive_int("n_group", default=1), config.positive_int("topk_group", default=1)
    experts = deepseek_experts_spec(config, groups if limited else (1, 1))
    return moe_model(config, latent_attention_spec(config), experts)


def build_v3_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of DeepSeek V3: MLA and sigmoid routing with a correction bias."""
    config.set_defaults(
        first_k_dense_replace=3,
        n_group=8,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_nextn_predict_layers=1,
        q_lora_rank=1536,
        routed_scaling_factor=2.5,
        topk_group=4,
    )
    config.require_value("attention_bias", False)
    return moe_model(config, latent_attention_spec(config), v3_experts_spec(config))


def build_v32_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of DeepSeek V3.2: V3 with sparse attention.

    An indexer selects `index_topk` keys for each token.
    """
    return sparse_attention_model(config, build_v3_spec(config))


def sparse_attention_model(
    config: ConfigReader,
    model: ModelSpec,
    num_heads: int = 64,
    interleaved: bool = False,
    has_indexer: Sequence[bool] | None = None,
) -> ModelSpec:
    """Add sparse attention (DSA) to a model with latent attention (MLA).

    An indexer scores the keys of a layer for each token, which attends to the `index_topk` best.

    Args:
        config: the model's configuration.
        model: the model with full attention.
        num_heads: default of `index_n_heads`, the heads of an indexer.
        interleaved: default of `indexer_rope_interleave`: True if the rotary embedding of an
            indexer rotates neighbouring elements.
        has_indexer: for each layer, True if it has an indexer; other layers reuse the keys of the
            layer before. None if all layers have one.
    """
    config.require_value("layer_types", ["indexed_attention"] * model.num_layers)
    name = "self_attn.indexer"
    indexer = IndexerSpec(
        num_heads=config.positive_int("index_n_heads", default=num_heads),
        head_dim=config.positive_int("index_head_dim", default=128),
        q_proj=LinearSpec((f"{name}.wq_b",)),
        k_proj=LinearSpec((f"{name}.wk",)),
        k_norm=NormSpec(f"{name}.k_norm", "layer", 1e-6, has_bias=True),
        weights_proj=f"{name}.weights_proj",
        is_interleaved=config.boolean("indexer_rope_interleave", default=interleaved),
    )
    selects = has_indexer or [True] * model.num_layers
    num_selected = config.positive_int("index_topk", default=2048)
    layers = []
    for layer, has_own in zip(model.layers, selects, strict=True):
        assert isinstance(layer.attention, LatentAttentionSpec), "the attention of DeepSeek V3"
        own = indexer if has_own else None
        attention = replace(layer.attention, num_selected=num_selected, indexer=own)
        if attention.rope_head_dim > indexer.head_dim:
            raise config.error(("index_head_dim",), "at least qk_rope_head_dim", indexer.head_dim)
        layers.append(replace(layer, attention=attention))
    return replace(model, layers=tuple(layers))


def build_youtu_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Youtu-LLM: MLA without experts."""
    config.set_defaults(q_lora_rank=1536)
    config.require_value("attention_bias", False)
    config.require_value("mlp_bias", False)
    config.ignore("embedding_initializer_range")
    layer = pre_norm_layer(config, latent_attention_spec(config), gated_mlp_spec(config))
    return decoder_model(config, [layer] * config.positive_int("num_hidden_layers"), tied=True)
