"""GPT-Neo.

Source: Black et al., "GPT-Neo" (2021), https://github.com/EleutherAI/gpt-neo.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import LinearSpec
from gllm.models.spec_builders import ACTIVATIONS, gpt2_model, layer_norm_spec, plain_mlp_spec


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of GPT-Neo: GPT-2 with windows in every other layer, unscaled scores."""
    hidden = config.positive_int("hidden_size", default=2048)
    heads = config.positive_int("num_heads", default=16)
    if hidden % heads:
        raise config.error(("num_heads",), f"a divisor of hidden_size {hidden}", heads)
    longest = config.positive_int("max_position_embeddings", default=2048)
    config.ignore("resid_dropout", "embed_dropout", "classifier_dropout")
    config.require_value("tie_word_embeddings", True)
    prefix = "attn.attention"
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        qkv_proj=LinearSpec(tuple(f"{prefix}.{name}_proj" for name in "qkv")),
        out_proj=LinearSpec((f"{prefix}.out_proj",), has_bias=True),
        scale=1.0,
    )
    window = config.positive_int("window_size", default=256)
    mlp = plain_mlp_spec(
        config.positive_int("intermediate_size", default=4 * hidden),
        config.choice("activation_function", ACTIVATIONS, "gelu_new"),
        ("mlp.c_fc", "mlp.c_proj"),
    )
    norms = layer_norm_spec(config, "ln_1"), layer_norm_spec(config, "ln_2")
    layers = [
        LayerSpec(replace(attention, window=window if kind == "local" else None), mlp, *norms)
        for kind in _layer_kinds(config)
    ]
    return gpt2_model(config, hidden, layers, longest)


def _layer_kinds(config: ConfigReader) -> list[str]:
    """Return "global" or "local" of each layer: lists of kinds, each with its repetitions."""
    count = config.positive_int("num_layers", default=24)
    # The same, written out.
    config.ignore("attention_layers")
    usual = [[["global", "local"], 12]]
    types = config.get("attention_types", default=usual)
    kinds: list[str] = []
    try:
        for names, repetitions in types:
            kinds += list(names) * min(repetitions, count)
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != count or set(map(str, kinds)) - {"global", "local"}:
        rule = f"a list of lists of global and local with repetitions, of {count} layers"
        raise config.error(("attention_types",), rule, types)
    return kinds
