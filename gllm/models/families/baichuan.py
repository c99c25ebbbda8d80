"""Baichuan and Baichuan 2.

Source: Yang et al., "Baichuan 2: Open Large-scale Language Models" (2023), sections 2.3 and 2.4.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.spec.model import ModelSpec
from gllm.models.spec_builders import attention_spec, decoder_model, gated_mlp_spec, pre_norm_layer

BAICHUAN2_VOCABULARY = 125_696


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of Baichuan: Llama with one tensor for queries, keys and values.

    The larger size has ALiBi instead of rotary positions, recognized by the key of the context
    length. The second release has an LM head with normalized rows, recognized by the vocabulary or
    by z_loss_weight.
    """
    rotates = config.has("max_position_embeddings")
    longest = config.positive_int("max_position_embeddings", "model_max_length")
    attention = attention_spec(config, names=("W_pack", "o_proj"))
    if not rotates:
        attention = replace(attention, rope=None, alibi_scale=1.0)
    layers = [pre_norm_layer(config, attention, gated_mlp_spec(config))] * config.positive_int(
        "num_hidden_layers"
    )
    model = decoder_model(config, layers, context_length=longest)
    is_second = model.vocab_size == BAICHUAN2_VOCABULARY or config.has("z_loss_weight")
    return replace(model, head=replace(model.head, has_normalized_rows=is_second))
