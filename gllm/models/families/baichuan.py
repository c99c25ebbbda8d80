"""Baichuan and Baichuan 2.

Source: Yang et al., "Baichuan 2: Open Large-scale Language Models" (2023), sections 2.3 and 2.4.
"""

from dataclasses import replace

from gllm.models.describe import attention_of, decoder, gated_mlp, pre_norm
from gllm.models.keys import Keys
from gllm.models.spec import Model

BAICHUAN2_VOCABULARY = 125_696


def describe(keys: Keys) -> Model:
    """Llama with one tensor for queries, keys and values. The larger size has biases by distance
    instead of rotations; its files tell by what they call the context's length. The second release
    has a head whose rows are of length 1; its files tell by the vocabulary, or by z_loss_weight."""
    rotates = keys.has("max_position_embeddings")
    longest = keys.count("max_position_embeddings", "model_max_length")
    attention = attention_of(keys, names=("W_pack", "o_proj"))
    if not rotates:
        attention = replace(attention, rope=None, alibi=1.0)
    layers = [pre_norm(keys, attention, gated_mlp(keys))] * keys.count("num_hidden_layers")
    model = decoder(keys, layers, context_length=longest)
    is_second = model.vocab_size == BAICHUAN2_VOCABULARY or keys.has("z_loss_weight")
    return replace(model, head=replace(model.head, unit_rows=is_second))
