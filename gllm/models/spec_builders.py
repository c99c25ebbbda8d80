"""Spec builders that many families share, with the tensor names and keys most of them use."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from gllm.models.config_reader import ConfigReader, is_finite
from gllm.models.errors import ModelError
from gllm.models.rope import read_query_scale, read_rope
from gllm.models.spec.attention import AttentionSpec, LatentAttentionSpec
from gllm.models.spec.feed_forward import MLPSpec
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import EmbeddingSpec, HeadSpec, ModelSpec, PositionEmbeddingSpec
from gllm.models.spec.parts import LinearSpec, NormSpec, RopeSpec
from gllm.models.spec.recurrent import ConvSpec, HeadVectorSpec, Mamba2Spec
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
    return sized_attention_spec(
        heads,
        head_dim,
        tuple(f"{prefix}.{name}" for name in names),
        qkv_bias,
        out_bias,
        num_kv_heads=kv_heads,
        rope=read_rope(config, head_dim, **{"ignored": ("llama_4_scaling_beta",)} | (rope or {})),
        query_scale=read_query_scale(config),
    )


def sized_attention_spec(
    num_heads: int,
    head_dim: int,
    names: Sequence[str],
    qkv_bias: bool = False,
    out_bias: bool = False,
    is_transposed: bool = False,
    **fields: Any,
) -> AttentionSpec:
    """Build the spec of attention from its sizes, without positions unless `fields` has them.

    Args:
        num_heads: number of query heads, and of KV heads unless `fields` has it.
        head_dim: elements of a head.
        names: tensor names of the projections; the output projection is last.
        qkv_bias: True if the query, key and value projections have biases.
        out_bias: True if the output projection has a bias.
        is_transposed: True if their weights are stored as [inputs, outputs].
        fields: further fields of AttentionSpec, which replace those above.
    """
    *inputs, output = names
    usual: dict[str, Any] = {"num_kv_heads": num_heads, "scale": head_dim**-0.5}
    return AttentionSpec(
        num_heads=num_heads,
        head_dim=head_dim,
        qkv_proj=LinearSpec(tuple(inputs), qkv_bias, is_transposed),
        out_proj=LinearSpec((output,), out_bias, is_transposed),
        **usual | fields,
    )


def latent_attention_spec(config: ConfigReader, **rope_options: Any) -> LatentAttentionSpec:
    """Build the spec of multi-head latent attention from config.json.

    rope_options: keyword arguments of `read_rope` that replace its usual ones.
    """
    # Heads of keys and values before the compression.
    config.ignore("num_key_value_heads", "head_dim", "qk_head_dim")
    hidden = config.positive_int("hidden_size")
    plain, turned = config.positive_int("qk_nope_head_dim"), config.positive_int("qk_rope_head_dim")
    if turned % 2:
        raise config.error(("qk_rope_head_dim",), "even: pairs are rotated", turned)
    interleaved = config.boolean("rope_interleave", default=True)
    rope = read_rope(config, **{"head_dim": turned, "interleaved": interleaved} | rope_options)
    if rope.dim != turned:
        raise ModelError(
            f"config.json: partial_rotary_factor rotates {rope.dim} elements, but "
            f"qk_rope_head_dim is {turned}"
        )
    scale = (plain + turned) ** -0.5
    if rope.parameters.get("mscale_all_dim") and rope.parameters["factor"] > 1:
        # YaRN's temperature, which is part of the scale here.
        stretch = math.log(rope.parameters["factor"])
        scale *= (0.1 * rope.parameters["mscale_all_dim"] * stretch + 1) ** 2
    rank = config.positive_int("q_lora_rank") if config.has("q_lora_rank") else None
    return LatentAttentionSpec(
        num_heads=config.positive_int("num_attention_heads"),
        nope_head_dim=plain,
        value_dim=config.positive_int("v_head_dim", default=config.default_of("v_head_dim", None)),
        kv_lora_rank=config.positive_int("kv_lora_rank"),
        rope_head_dim=turned,
        rope=rope,
        q_proj=LinearSpec(("self_attn.q_b_proj" if rank else "self_attn.q_proj",)),
        q_down_proj=LinearSpec(("self_attn.q_a_proj",)) if rank else None,
        q_norm=rms_norm_spec(config, "self_attn.q_a_layernorm") if rank else None,
        q_input_size=rank or hidden,
        kv_down_proj=LinearSpec(("self_attn.kv_a_proj_with_mqa",)),
        kv_norm=rms_norm_spec(config, "self_attn.kv_a_layernorm"),
        kv_up_proj=LinearSpec(("self_attn.kv_b_proj",)),
        out_proj=LinearSpec(("self_attn.o_proj",)),
        scale=scale,
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


def mamba2_spec(
    config: ConfigReader,
    prefix: str,
    num_heads: int,
    head_dim: int,
    keys: Sequence[str] = (
        *("mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias"),
        *("mamba_proj_bias", "rms_norm_eps"),
    ),
    defaults: tuple[int, int, float] = (1, 256, 1e-6),
    heads_key: str = "mamba_n_heads",
) -> Mamba2Spec:
    """Build the spec of a Mamba 2 block from config.json.

    Args:
        config: the model's configuration.
        prefix: common prefix of the tensor names.
        num_heads: number of heads.
        head_dim: elements per head.
        keys: keys of the number of groups, the elements of a key, the tokens of the convolution,
            whether it has a bias, whether the projections have biases, and the norm's epsilon.
        defaults: number of groups, elements of a key and epsilon if the keys are not set.
        heads_key: key of the number of heads, for messages.
    """
    groups_key, state_key, conv_key, conv_bias, proj_bias, eps_key = keys
    num_groups = config.positive_int(groups_key, default=defaults[0])
    if num_heads % num_groups:
        raise config.error((groups_key,), f"a divisor of the {num_heads} heads", num_groups)
    smallest, largest = _read_step_limits(config)
    config.ignore("mamba_chunk_size", "chunk_size")
    has_bias = config.boolean(proj_bias)
    return Mamba2Spec(
        num_heads=num_heads,
        num_groups=num_groups,
        head_dim=head_dim,
        state_size=config.positive_int(state_key, default=defaults[1]),
        in_proj=LinearSpec((f"{prefix}.in_proj",), has_bias),
        conv=ConvSpec(
            (f"{prefix}.conv1d",),
            config.positive_int(conv_key, default=4),
            config.boolean(conv_bias, default=True),
        ),
        decay=HeadVectorSpec(f"{prefix}.A_log"),
        step_bias=HeadVectorSpec(f"{prefix}.dt_bias"),
        skip=HeadVectorSpec(f"{prefix}.D"),
        norm=NormSpec(f"{prefix}.norm", "rms", config.positive_float(eps_key, default=defaults[2])),
        out_proj=LinearSpec((f"{prefix}.out_proj",), has_bias),
        min_step=smallest,
        max_step=largest,
        heads_key=heads_key,
        groups_key=groups_key,
    )


def expanded_mamba2_spec(config: ConfigReader) -> Mamba2Spec:
    """Build the spec of a Mamba 2 block whose heads have mamba_expand * hidden_size elements."""
    heads = config.positive_int("mamba_n_heads", default=128)
    inner = config.positive_int("mamba_expand", default=2) * config.positive_int("hidden_size")
    head_dim = config.positive_int_or_auto("mamba_d_head", inner // heads)
    if head_dim * heads != inner:
        rule = f"mamba_expand * hidden_size / mamba_n_heads, {inner} / {heads}"
        raise config.error(("mamba_d_head",), rule, head_dim)
    return mamba2_spec(config, "mamba", heads, head_dim)


def _read_step_limits(config: ConfigReader) -> tuple[float, float]:
    """Return the limits of time steps: two numbers, the second of which may be infinite."""
    limits = config.get("time_step_limit", default=[0.0, INFINITY])
    if isinstance(limits, list) and len(limits) == 2:
        low, high = (math.inf if one == INFINITY else one for one in limits)
        is_infinite = isinstance(high, float) and high == math.inf
        if is_finite(low) and (is_infinite or is_finite(high)) and 0 <= low <= high:
            return float(low), float(high)
    raise config.error(("time_step_limit",), "a list of two numbers from 0 on, ascending", limits)


def layer_norm_spec(
    config: ConfigReader, name: str, eps: str = "layer_norm_epsilon", **variant: Any
) -> NormSpec:
    """Build the spec of a LayerNorm with a bias; epsilon is read from the key `eps`.

    variant: further fields of NormSpec, which replace those above.
    """
    fields = {"has_bias": True} | variant
    return NormSpec(name, "layer", config.positive_float(eps, default=1e-5), **fields)


def rms_norm_spec(
    config: ConfigReader, name: str, eps: str = "rms_norm_eps", default: float = 1e-6
) -> NormSpec:
    """Build the spec of an RMSNorm; epsilon is read from the key `eps` or is `default`."""
    return NormSpec(name, "rms", config.positive_float(eps, default=default))


def offset_norm_spec(config: ConfigReader, name: str) -> NormSpec:
    """Build the spec of an RMSNorm whose stored scale is relative to 1, as in Gemma."""
    return replace(rms_norm_spec(config, name), offset=1.0)


def gpt2_model(
    config: ConfigReader, hidden: int, layers: Sequence[LayerSpec], longest: int
) -> ModelSpec:
    """Build the ModelSpec of models like GPT-2: learned positions, and the embedding as head.

    Args:
        config: config.json.
        hidden: elements of a hidden state.
        layers: all layers.
        longest: positions that have an embedding.
    """
    positions = PositionEmbeddingSpec("transformer.wpe", longest)
    return ModelSpec(
        vocab_size=config.positive_int("vocab_size", default=50257),
        hidden_size=hidden,
        embedding=EmbeddingSpec("transformer.wte", positions=positions),
        layers=tuple(layers),
        norm=layer_norm_spec(config, "transformer.ln_f"),
        head=HeadSpec("transformer.wte"),
        context_length=longest,
        layer_name_format="transformer.h.{}",
        # Masks in older files.
        ignored_tensors=(r".*\.(attn|attention)\.(bias|masked_bias)",),
    )


def pre_norm_layer(
    config: ConfigReader,
    attention: Any,
    mlp: Any,
    norm: Callable[[ConfigReader, str], NormSpec] = rms_norm_spec,
    names: Sequence[str] = ("input_layernorm", "post_attention_layernorm"),
) -> LayerSpec:
    """Build the spec of a decoder layer with norms before attention and MLP, as in Llama.

    Args:
        config: the model's configuration.
        attention: attention, or another block in its place.
        mlp: feed-forward block.
        norm: builds a norm from config.json and its name.
        names: tensor names of both norms.
    """
    attention_norm, mlp_norm = (norm(config, name) for name in names)
    return LayerSpec(attention, mlp, attention_norm, mlp_norm)


def four_norm_layer(
    config: ConfigReader,
    attention: Any,
    mlp: Any,
    norm: Callable[[ConfigReader, str], NormSpec] = rms_norm_spec,
) -> LayerSpec:
    """Build the spec of a decoder layer with norms before and after both blocks, as in Gemma 2.

    norm: builds a norm from config.json and its name.
    """
    return LayerSpec(
        attention,
        mlp,
        attention_norm=norm(config, "input_layernorm"),
        post_attention_norm=norm(config, "post_attention_layernorm"),
        mlp_norm=norm(config, "pre_feedforward_layernorm"),
        post_mlp_norm=norm(config, "post_feedforward_layernorm"),
    )


def post_norm_layer(config: ConfigReader, attention: Any, mlp: Any) -> LayerSpec:
    """Build the spec of a decoder layer with norms only after attention and MLP, as in OLMo 2."""
    return LayerSpec(
        attention,
        mlp,
        attention_norm=None,
        mlp_norm=None,
        post_attention_norm=rms_norm_spec(config, "post_attention_layernorm"),
        post_mlp_norm=rms_norm_spec(config, "post_feedforward_layernorm"),
    )


def with_head_norms(
    config: ConfigReader,
    attention: AttentionSpec,
    names: Sequence[str] = ("q_norm", "k_norm"),
    norm: Callable[[ConfigReader, str], NormSpec] = rms_norm_spec,
) -> AttentionSpec:
    """Return attention with norms of queries and keys, by these names."""
    query_norm, key_norm = (norm(config, f"self_attn.{name}") for name in names)
    return replace(attention, query_norm=query_norm, key_norm=key_norm)


def with_shared_kv(
    config: ConfigReader, attentions: Sequence[AttentionSpec], kinds: Sequence[str]
) -> list[AttentionSpec]:
    """Return attention of all layers, the last `num_kv_shared_layers` of which keep nothing.

    They read the keys and values of the last layer of their kind that keeps its own.

    Args:
        config: the model's configuration.
        attentions: attention of each layer, with keys and values of its own.
        kinds: kind of each layer; layers of a kind have equal attention.
    """
    count = len(kinds)
    num_shared = config.non_negative_int("num_kv_shared_layers", default=0)
    own = kinds[: count - num_shared]
    if num_shared >= count or set(own) != set(kinds):
        rule = f"such that all kinds of layers are among the first {count} - {num_shared}"
        raise config.error(("num_kv_shared_layers",), rule, num_shared)
    last = {kind: index for index, kind in enumerate(own)}
    shared = [
        replace(
            attention,
            qkv_proj=replace(attention.qkv_proj, names=attention.qkv_proj.names[:1]),
            key_norm=None,
            value_norm=None,
            kv_layers_back=index - last[kinds[index]],
        )
        for index, attention in enumerate(attentions)
        if index >= len(own)
    ]
    return [*attentions[: len(own)], *shared]


def read_rope_layers(config: ConfigReader) -> list[bool]:
    """Return whether each layer rotates queries and keys, by `no_rope_layers`.

    The key has a number for each layer: 0 for a layer without positions. If it is absent, these are
    every `no_rope_layer_interval`-th layer.
    """
    count = config.positive_int("num_hidden_layers")
    interval = config.positive_int("no_rope_layer_interval", default=4)
    usual = [int((layer + 1) % interval != 0) for layer in range(count)]
    rotates = config.get("no_rope_layers", default=usual) or usual
    is_list = isinstance(rotates, list) and all(one in (0, 1) for one in rotates)
    if not is_list or len(rotates) != count:
        raise config.error(("no_rope_layers",), f"a list of {count} numbers 0 or 1", rotates)
    return [bool(one) for one in rotates]


def windowed_layers(
    config: ConfigReader,
    attention: AttentionSpec,
    mlp: Any,
    windows: Sequence[int | None],
    local_rope: RopeSpec | None = None,
    layer: Callable[[ConfigReader, Any, Any], LayerSpec] = pre_norm_layer,
) -> list[LayerSpec]:
    """Build the specs of decoder layers that differ in their sliding windows.

    Args:
        config: the model's configuration.
        attention: attention of all layers, whose window is replaced.
        mlp: feed-forward block of all layers.
        windows: sliding window of each layer in tokens; None for full attention.
        local_rope: rotary embedding of layers with a window; None for that of all layers.
        layer: builds a layer from config.json and its blocks.
    """
    local = replace(attention, rope=local_rope or attention.rope)
    by_window = {
        window: layer(config, replace(attention if window is None else local, window=window), mlp)
        for window in dict.fromkeys(windows)
    }
    return [by_window[window] for window in windows]


INFINITY = {"__float__": "Infinity"}
"""Infinity as transformers writes it to config.json."""
OLD_LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
"""Entries of `layer_types` in older files, and what they are called today."""


def read_layer_types(
    config: ConfigReader, names: Sequence[str], default: Sequence[str]
) -> list[str]:
    """Return the entries of `layer_types`, one for each layer.

    Args:
        config: the model's configuration.
        names: entries that the family has.
        default: entries if the key is not set; as many as the model has layers.
    """
    types = config.get("layer_types", "layers_block_type", default=list(default))
    is_list = isinstance(types, list) and all(isinstance(one, str) for one in types)
    if is_list:
        types = [OLD_LAYER_TYPES.get(one, one) for one in types]
    if not is_list or len(types) != len(default) or set(types) - set(names):
        raise ModelError(
            f"config.json: layer_types is {types!r:.80}, but has to be a list of "
            f"{len(default)} of {', '.join(names)}"
        )
    return list(types)


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
    names = "full_attention", "sliding_attention"
    types = read_layer_types(config, names, [names[slide] for slide in default])
    slides = [one == names[1] for one in types]
    size = read_sliding_window(config)
    if size is None and any(slides) and (required or config.has("layer_types")):
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
    embedding_scale: float = 1.0,
    head: Mapping[str, Any] = MappingProxyType({}),
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
        embedding_scale: factor of the embedding.
        head: further fields of HeadSpec; `untied_name` names its tensor unless the head is tied.
        changes: further fields of ModelSpec, which replace those above.
    """
    embedding = embedding or EmbeddingSpec(f"{root}embed_tokens", embedding_scale)
    tied = config.boolean("tie_word_embeddings", default=tied)
    fields: dict[str, Any] = {
        "vocab_size": config.positive_int("vocab_size"),
        "hidden_size": config.positive_int("hidden_size"),
        "embedding": embedding,
        "layers": tuple(layers),
        "norm": norm or rms_norm_spec(config, f"{root}norm"),
        "head": HeadSpec(embedding.name if tied else head.get("untied_name", "lm_head"), **head),
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
