"""OPT.

Source: Zhang et al., "OPT: Open Pre-trained Transformer Language Models" (2022).
"""

from gllm.models.config_reader import ConfigReader
from gllm.models.errors import ModelError
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import EmbeddingSpec, ModelSpec, PositionEmbeddingSpec
from gllm.models.spec.parts import NormSpec
from gllm.models.spec_builders import (
    ACTIVATIONS,
    decoder_model,
    plain_mlp_spec,
    sized_attention_spec,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of OPT: learned positions in a table whose first two rows are unused."""
    hidden = config.positive_int("hidden_size")
    _check(config, hidden)
    heads = config.positive_int("num_attention_heads")
    bias = config.boolean("enable_bias", default=True)
    names = tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj"))
    attention = sized_attention_spec(heads, hidden // heads, names, bias, bias)
    size = config.positive_int("ffn_dim")
    activation = config.choice("activation_function", ACTIVATIONS, "relu")
    mlp = plain_mlp_spec(size, activation, ("fc1", "fc2"), bias)
    layer = LayerSpec(attention, mlp, _norm("self_attn_layer_norm"), _norm("final_layer_norm"))
    longest, root = config.positive_int("max_position_embeddings"), "model.decoder."
    positions = PositionEmbeddingSpec(f"{root}embed_positions", longest + 2, offset=2)
    return decoder_model(
        config,
        [layer] * config.positive_int("num_hidden_layers"),
        tied=True,
        root=root,
        embedding=EmbeddingSpec(f"{root}embed_tokens", positions=positions),
        norm=_norm(f"{root}final_layer_norm"),
    )


def _norm(name: str) -> NormSpec:
    return NormSpec(name, "layer", 1e-5, has_bias=True)


def _check(config: ConfigReader, hidden: int) -> None:
    """Raise ModelError for the 350M size: post-norms and narrower embeddings."""
    config.require_value("do_layer_norm_before", True)
    config.require_value("word_embed_proj_dim", hidden)
    config.require_value("_remove_final_layer_norm", False)
    config.require_value("layer_norm_elementwise_affine", True)
    if hidden % config.positive_int("num_attention_heads"):
        raise ModelError("config.json: hidden_size is no multiple of num_attention_heads")
