"""GPT-NeoX and Pythia.

Source: Black et al., "GPT-NeoX-20B" (2022), section 2.1; Biderman et al., "Pythia" (2023).
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.spec.model import EmbeddingSpec, ModelSpec
from gllm.models.spec.parts import NormSpec
from gllm.models.spec_builders import (
    ACTIVATIONS,
    attention_spec,
    decoder_model,
    layer_norm_spec,
    plain_mlp_spec,
    pre_norm_layer,
)


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of GPT-NeoX: parallel layers with two norms, a part of heads rotated."""
    config.ignore("classifier_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob")
    bias = config.boolean("attention_bias", default=True)
    share = "partial_rotary_factor", "rotary_pct"
    config.rename(rope_theta="rotary_emb_base", partial_rotary_factor=share)
    names = "query_key_value", "dense"
    attention = attention_spec(config, {"partial": 0.25}, bias, bias, names, "attention")
    activation = config.choice("hidden_act", ACTIVATIONS, "gelu")
    size = config.positive_int("intermediate_size", default=24576)
    mlp = plain_mlp_spec(size, activation, ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"))
    layer = replace(
        pre_norm_layer(config, replace(attention, is_grouped_by_kv_head=True), mlp, _norm),
        is_parallel=config.boolean("use_parallel_residual", default=True),
    )
    return decoder_model(
        config,
        [layer] * config.positive_int("num_hidden_layers"),
        root="gpt_neox.",
        embedding=EmbeddingSpec("gpt_neox.embed_in"),
        norm=_norm(config, "gpt_neox.final_layer_norm"),
        ignored_tensors=(r".*\.attention\.(bias|masked_bias)",),
        head={"untied_name": "embed_out"},
    )


def _norm(config: ConfigReader, name: str) -> NormSpec:
    return layer_norm_spec(config, name, "layer_norm_eps")
