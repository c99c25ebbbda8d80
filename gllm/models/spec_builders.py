"""Spec builders that many families share, with the tensor names and keys most of them use."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gllm.models.config_reader import ConfigReader
from gllm.models.errors import ModelError
from gllm.models.rope import read_rope
from gllm.models.spec import (
    AttentionSpec,
    EmbeddingSpec,
    ExpertsSpec,
    HeadSpec,
    LayerSpec,
    LinearSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
)
from gllm.options.options import INT32_MAX

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Activation names of config.json to those of gllm.kernels.activation."""


def attention_spec(
    config: ConfigReader,
    rope: dict[str, Any] | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    names: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    prefix: str = "self_attn",
) -> AttentionSpec:
    """Build the spec of grouped-query attention with a rotary embedding from config.json.

    Args:
        config: the model's configuration.
        rope: keyword arguments of `read_rope`.
        qkv_bias: True if the query, key and value projections have biases.
        out_bias: True if the output projection has a bias.
        names: tensor names of the projections; the output projection is last.
        prefix: common prefix of these names.
    """
    heads, hidden = config.positive_int("num_attention_heads"), config.positive_int("hidden_size")
    if heads > hidden:
        raise ModelError(f"config.json: num_attention_heads {heads} is above hidden_size {hidden}")
    kv_heads = config.positive_int("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} is no multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    head_dim = config.positive_int("head_dim", default=hidden // heads)
    *inputs, output = (f"{prefix}.{name}" for name in names)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_proj=LinearSpec(tuple(inputs), qkv_bias),
        out_proj=LinearSpec((output,), out_bias),
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim, **(rope or {})),
    )


def gated_mlp_spec(
    config: ConfigReader,
    prefix: str = "mlp",
    intermediate_size: int | None = None,
    bias: bool = False,
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    activation: str = "hidden_act",
    default: str = "silu",
) -> MLPSpec:
    """Build the spec of a gated MLP from config.json.

    Args:
        config: the model's configuration.
        prefix: common prefix of the tensor names.
        intermediate_size: size between the projections; None to read it from `intermediate_size`.
        bias: True if the projections have biases.
        names: tensor names of the projections; the down projection is last.
        activation: key in config.json with the name of the activation.
        default: activation if the key is not set.
    """
    *up, down = (f"{prefix}.{name}" for name in names)
    return MLPSpec(
        intermediate_size=intermediate_size or config.positive_int("intermediate_size"),
        activation=config.choice(activation, ACTIVATIONS, default),
        up_proj=LinearSpec(tuple(up), bias),
        down_proj=LinearSpec((down,), bias),
    )


def plain_mlp_spec(
    intermediate_size: int,
    activation: str,
    names: tuple[str, str],
    bias: bool = True,
    is_transposed: bool = False,
) -> MLPSpec:
    """Build the spec of an MLP without a gate.

    Args:
        intermediate_size: elements between the projections.
        activation: a name of gllm.kernels.activation.
        names: tensor names of the up and the down projection.
        bias: True if both projections have biases.
        is_transposed: True if their weights are stored as [inputs, outputs].
    """
    up, down = (LinearSpec((name,), bias, is_transposed) for name in names)
    return MLPSpec(intermediate_size, activation, up, down, is_gated=False)


def layer_norm_spec(config: ConfigReader, name: str) -> NormSpec:
    """Build the spec of a LayerNorm with a bias; epsilon is read from config.json."""
    eps = config.positive_float("layer_norm_epsilon", default=1e-5)
    return NormSpec(name, "layer", eps, has_bias=True)


def rms_norm_spec(config: ConfigReader, name: str, offset: float = 0.0) -> NormSpec:
    """Build the spec of an RMSNorm; epsilon is read from config.json.

    offset: added to the stored scale, for example 1 in Gemma.
    """
    return NormSpec(name, "rms", config.positive_float("rms_norm_eps", default=1e-6), offset=offset)


def pre_norm_layer(config: ConfigReader, attention: Any, mlp: Any) -> LayerSpec:
    """Build the spec of a decoder layer with RMSNorm before attention and MLP, as in Llama."""
    attention_norm = rms_norm_spec(config, "input_layernorm")
    mlp_norm = rms_norm_spec(config, "post_attention_layernorm")
    return LayerSpec(attention, mlp, attention_norm, mlp_norm)


def windowed_layers(
    config: ConfigReader, attention: AttentionSpec, mlp: Any, windows: Sequence[int | None]
) -> list[LayerSpec]:
    """Build the specs of decoder layers as in Llama that differ in their sliding windows.

    Args:
        config: the model's configuration.
        attention: attention of all layers, whose window is replaced.
        mlp: feed-forward block of all layers.
        windows: sliding window of each layer in tokens; None for full attention.
    """
    return [pre_norm_layer(config, replace(attention, window=window), mlp) for window in windows]


def read_sliding_window(config: ConfigReader) -> int | None:
    """Return `sliding_window` of config.json in tokens, or None if it is unset or 0."""
    return (
        None if config.get("sliding_window") in (None, 0) else config.positive_int("sliding_window")
    )


def read_layer_windows(
    config: ConfigReader, default: Sequence[bool], required: bool = False
) -> list[int | None]:
    """Return the sliding window of each layer in tokens; None for full attention.

    Args:
        config: the model's configuration.
        default: True for each layer that has a window if the key `layer_types` is not set.
        required: True if `sliding_window` must be set if layers of `default` have a window.
    """
    types = config.get("layer_types")
    slides = list(default)
    if types is not None:
        known = {"full_attention": False, "sliding_attention": True}
        is_list = isinstance(types, list) and all(isinstance(one, str) for one in types)
        if not is_list or len(types) != len(slides) or set(types) - set(known):
            raise ModelError(
                f"config.json: layer_types is {types!r:.80}, but has to be a list of "
                f"{len(slides)} of {', '.join(known)}"
            )
        slides = [known[one] for one in types]
    size = read_sliding_window(config)
    if size is None and any(slides) and (required or types is not None):
        raise config.error(("sliding_window",), "a positive integer", config.get("sliding_window"))
    return [size if slide else None for slide in slides]


def window_notes(windows: Sequence[int | None]) -> tuple[str, ...]:
    """Return notes for the log if layers have windows and transformers ignores `layer_types`."""
    num_full = sum(window is None for window in windows)
    if num_full in (0, len(windows)):
        return ()
    return (
        f"config.json: {num_full} of {len(windows)} layers have full attention, as layer_types "
        "says; transformers ignores layer_types in this architecture",
    )


def decoder_model(
    config: ConfigReader,
    layers: Sequence[LayerSpec],
    tied: bool = False,
    root: str = "model.",
    embedding: EmbeddingSpec | None = None,
    norm: NormSpec | None = None,
    context_length: int | None = None,
    **changes: Any,
) -> ModelSpec:
    """Build the spec of a decoder-only model from its layers and config.json.

    Tensor names default to Llama's.

    Args:
        config: the model's configuration.
        layers: specs of the layers, in order.
        tied: default of `tie_word_embeddings`.
        root: prefix of tensor names.
        embedding: token embedding; None for the tensor root + embed_tokens.
        norm: final norm; None for an RMSNorm with the tensor root + norm.
        context_length: longest sequence in tokens; None to read it from `max_position_embeddings`,
            extended by YaRN or linear scaling.
        changes: further fields of ModelSpec, which replace those above.
    """
    embedding = embedding or EmbeddingSpec(f"{root}embed_tokens")
    tied = config.boolean("tie_word_embeddings", default=tied)
    fields: dict[str, Any] = {
        "vocab_size": config.positive_int("vocab_size"),
        "hidden_size": config.positive_int("hidden_size"),
        "embedding": embedding,
        "layers": tuple(layers),
        "norm": norm or rms_norm_spec(config, f"{root}norm"),
        "head": HeadSpec(embedding.name if tied else "lm_head"),
        "context_length": context_length or read_context_length(config, layers),
        "layer_name_format": f"{root}layers.{{}}",
    }
    return ModelSpec(**fields | changes)


def sliding_window_model(config: ConfigReader, attention: AttentionSpec, mlp: Any) -> ModelSpec:
    """Build the spec of a model as Llama's with sliding windows.

    All layers have the window, or those that `layer_types` in config.json names.
    """
    windows = read_layer_windows(config, [True] * config.positive_int("num_hidden_layers"))
    layers = windowed_layers(config, attention, mlp, windows)
    return decoder_model(config, layers, notes=window_notes(windows))


def read_context_length(config: ConfigReader, layers: Sequence[LayerSpec]) -> int:
    """Return the longest sequence in tokens from config.json, extended as the rope scaling says.

    YaRN extends the original context and linear scaling `max_position_embeddings`, as in vLLM.
    """
    positions = longest = config.positive_int("max_position_embeddings")
    for rope in {layer.attention.rope for layer in layers if layer.attention.rope is not None}:
        if rope.kind == "yarn":
            original = rope.parameters["original_max_position_embeddings"]
            longest = max(longest, int(original * rope.parameters["factor"]))
        if rope.kind == "linear":
            longest = max(longest, int(positions * rope.parameters["factor"]))
    if longest > INT32_MAX:
        raise ModelError(f"config.json: rope parameter factor makes a context of {longest} tokens")
    return longest


def check_experts(experts: ExpertsSpec) -> ExpertsSpec:
    """Check that the numbers of experts, groups and selected experts are consistent.

    Returns the argument. Raises ModelError.
    """
    total, groups, selected = experts.num_experts, experts.num_groups, experts.top_k_groups
    size = total // groups
    minimum = 2 if experts.group_scoring == "best two" and groups > 1 else 1
    rules = (
        ("n_group", groups, total % groups == 0, f"a divisor of the {total} experts"),
        ("n_group", groups, size >= minimum, f"such that groups have {minimum} or more experts"),
        ("topk_group", selected, selected <= groups, f"at most n_group {groups}"),
        (
            "num_experts_per_tok",
            experts.top_k,
            experts.top_k <= selected * size,
            f"at most {selected * size}, the number of experts to select from",
        ),
    )
    for name, value, is_met, rule in rules:
        if not is_met:
            raise ModelError(f"config.json: {name} is {value}, but has to be {rule}")
    return experts
