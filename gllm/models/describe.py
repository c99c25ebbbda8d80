"""What the configurations of many families have in common.

Owns the parts that a family's description is put together from, with the names and keys that most
families use. Knows no family.
"""

from collections.abc import Sequence
from typing import Any

from gllm.models.errors import ModelError
from gllm.models.keys import Keys
from gllm.models.spec import MLP, Attention, Embedding, Head, Layer, Linear, Model, Norm, Rope

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Names in configurations to names in gllm/kernels/activation.py."""

ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": (
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        set(),
    ),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
    "longrope": (
        {"short_factor", "long_factor", "original_max_position_embeddings", "factor"},
        {"attention_factor", "short_mscale", "long_mscale"},
    ),
}
"""Parameters of each kind of rotary scaling: required, optional."""


def rope_of(
    keys: Keys,
    head_dim: int,
    interleaved: bool = False,
    partial: float | None = None,
    theta: float | None = None,
    layer_type: str | None = None,
) -> Rope:
    """From `rope_parameters`, or from `rope_scaling` and `rope_theta` as older files have it.

    `partial`: share of a head that is rotated, where the file does not say (None: the family always
    rotates all); `theta`: where the object does not say, instead of `rope_theta`; `layer_type`:
    which of `rope_parameters`, where each type of layer has its own.
    """
    given: Any = keys.get("rope_scaling", "rope_parameters", default={})
    if layer_type is not None and layer_type in given:
        given = given[layer_type]
    if not isinstance(given, dict):
        raise ModelError(f"config.json: rope_parameters is {given!r}, but has to be an object")
    given = {key: value for key, value in given.items() if value is not None}
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    usual = keys.assumed("rope_theta", 10_000.0)
    theta = given.pop("rope_theta", theta or keys.number("rope_theta", default=usual))
    share = given.pop("partial_rotary_factor", keys.get("partial_rotary_factor", default=partial))
    if partial is None and share not in (None, 1):
        raise ModelError(f"config.json: partial_rotary_factor {share!r} is not implemented here")
    kind = "longrope" if kind == "su" else kind
    if kind not in ROPE_KEYS:
        raise ModelError(
            f"config.json: rope_type {kind!r} is not implemented, only {', '.join(ROPE_KEYS)} are"
        )
    _complete(given, kind, keys)
    if not isinstance(theta, int | float) or isinstance(theta, bool) or theta <= 0:
        raise ModelError(f"config.json: rope_theta is {theta!r}, but has to be a positive number")
    dim = int(head_dim * (share or 1))
    if dim % 2 or not 0 < dim <= head_dim:
        raise ModelError(
            f"config.json: {dim} of head_dim {head_dim} elements are to be rotated, but rotary "
            "embedding needs pairs"
        )
    _check_factors(given, dim)
    return Rope(dim, kind, float(theta), given, interleaved)


def _complete(given: dict[str, Any], kind: str, keys: Keys) -> None:
    """Fill in what other keys say, and refuse what is missing or unknown."""
    required, optional = ROPE_KEYS[kind]
    if "original_max_position_embeddings" in required:
        longest = keys.count("max_position_embeddings")
        original = keys.count("original_max_position_embeddings", default=longest)
        original = given.setdefault("original_max_position_embeddings", original)
        if kind == "longrope" and isinstance(original, int) and original > 0:
            given.setdefault("factor", longest / original)
    else:
        keys.skip("original_max_position_embeddings")
        given.pop("original_max_position_embeddings", None)
    missing, unknown = required - given.keys(), given.keys() - required - optional
    if missing or unknown:
        fault = f"lacks {sorted(missing)}" if missing else f"has unknown keys {sorted(unknown)}"
        raise ModelError(f"config.json: rope scaling {kind!r} {fault}")


def _check_factors(given: dict[str, Any], dim: int) -> None:
    """Numbers, but for the lists of longrope, one number for each pair."""
    for key, value in given.items():
        values = value if key in ("short_factor", "long_factor") else [value]
        good = isinstance(values, list) and all(isinstance(one, int | float) for one in values)
        if not good:
            raise ModelError(f"config.json: rope parameter {key} is {value!r}, which is no number")
        if key in ("factor", "original_max_position_embeddings") and value <= 0:
            raise ModelError(
                f"config.json: rope parameter {key} is {value!r}, but has to be positive"
            )
        if key in ("short_factor", "long_factor") and len(values) != dim // 2:
            raise ModelError(
                f"config.json: rope parameter {key} has {len(values)} numbers, but "
                f"{dim // 2} pairs are rotated"
            )


def attention_of(
    keys: Keys,
    rope: dict[str, Any] | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    names: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    prefix: str = "self_attn",
) -> Attention:
    """Grouped queries with rotary positions; `rope`: options of `rope_of`; `names`: of the
    projections, the output's last."""
    heads = keys.count("num_attention_heads")
    kv_heads = keys.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} is no multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    head_dim = keys.count("head_dim", default=keys.count("hidden_size") // heads)
    *inputs, output = (f"{prefix}.{name}" for name in names)
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qkv=Linear(tuple(inputs), qkv_bias),
        out=Linear((output,), out_bias),
        scale=head_dim**-0.5,
        rope=rope_of(keys, head_dim, **(rope or {})),
    )


def gated_mlp(
    keys: Keys,
    prefix: str = "mlp",
    inner: int | None = None,
    bias: bool = False,
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    activation: str = "hidden_act",
    default: str = "silu",
) -> MLP:
    """A gated feed-forward block of `inner` elements (default: intermediate_size); `names`: of the
    projections, the one down last; `activation`: the key that names it, and its `default`."""
    *up, down = (f"{prefix}.{name}" for name in names)
    return MLP(
        inner=inner or keys.count("intermediate_size"),
        activation=keys.choice(activation, ACTIVATIONS, default),
        up=Linear(tuple(up), bias),
        down=Linear((down,), bias),
    )


def rms_norm(keys: Keys, name: str, offset: float = 0.0) -> Norm:
    """With the epsilon of the file."""
    return Norm(name, "rms", keys.number("rms_norm_eps", default=1e-6), offset=offset)


def pre_norm(keys: Keys, attention: Any, mlp: Any) -> Layer:
    """A layer with RMSNorm before each of its halves, as Llama has it."""
    before = rms_norm(keys, "input_layernorm"), rms_norm(keys, "post_attention_layernorm")
    return Layer(attention, mlp, *before)


def window_of(keys: Keys) -> int | None:
    """sliding_window, where it is set."""
    return keys.count("sliding_window") if keys.get("sliding_window") else None


def layer_windows(keys: Keys, default: Sequence[bool], required: bool = False) -> list[int | None]:
    """The window of each layer; `default`: which have one, where layer_types does not say;
    `required`: whether these layers need one, so that sliding_window cannot be null."""
    types = keys.get("layer_types")
    slides = list(default)
    if types is not None:
        known = {"full_attention": False, "sliding_attention": True}
        if not isinstance(types, list) or len(types) != len(slides) or set(types) - set(known):
            raise ModelError(
                f"config.json: layer_types is {types!r:.80}, but has to be a list of "
                f"{len(slides)} of {', '.join(known)}"
            )
        slides = [known[one] for one in types]
    size = window_of(keys)
    if size is None and any(slides) and (required or types is not None):
        raise keys.error(("sliding_window",), "a positive integer", keys.get("sliding_window"))
    return [size if slide else None for slide in slides]


def decoder(
    keys: Keys,
    layers: Sequence[Layer],
    tied: bool = False,
    root: str = "model.",
    embedding: Embedding | None = None,
    norm: Norm | None = None,
    context_length: int | None = None,
    **changes: Any,
) -> Model:
    """A model with Llama's names where no others are given.

    `tied`: whether the head's weights are the embedding's, where the file does not say; `changes`:
    further fields of the model.
    """
    embedding = embedding or Embedding(f"{root}embed_tokens")
    tied = keys.flag("tie_word_embeddings", default=tied)
    made: dict[str, Any] = {
        "vocab_size": keys.count("vocab_size"),
        "hidden_size": keys.count("hidden_size"),
        "embedding": embedding,
        "layers": tuple(layers),
        "norm": norm or rms_norm(keys, f"{root}norm"),
        "head": Head(embedding.name if tied else "lm_head"),
        "context_length": context_length or context_of(keys, layers),
        "layer_name": f"{root}layers.{{}}",
    }
    return Model(**made | changes)


def context_of(keys: Keys, layers: Sequence[Layer]) -> int:
    """Positions that the model is made for, stretched ones included."""
    longest = keys.count("max_position_embeddings")
    for rope in {layer.attention.rope for layer in layers if layer.attention.rope is not None}:
        if rope.kind == "yarn":
            original = rope.parameters["original_max_position_embeddings"]
            longest = max(longest, int(original * rope.parameters["factor"]))
    return longest
