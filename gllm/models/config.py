"""A model's configuration: config.json and generation_config.json, checked.

Owns which keys are understood: a key that is neither computed nor known to be harmless is refused
by name, so that no model is ever computed wrongly in silence. Knows nothing of tensors; the
frontend reads it without torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gllm.models.errors import ModelError
from gllm.models.registry import ARCHITECTURES

COMPUTED = {
    *("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "eos_token_id"),
    *("torch_dtype", "dtype"),
}
"""Keys that the arithmetic follows."""

ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "quantization_config": (None,),
}
"""Keys that choose between kinds of arithmetic, with the values that are implemented."""

HARMLESS = {
    *("model_type", "transformers_version", "_name_or_path", "name_or_path", "tokenizer_class"),
    *("bos_token_id", "pad_token_id", "use_cache", "return_dict", "torchscript", "is_decoder"),
    *("initializer_range", "attention_dropout", "hidden_dropout", "use_bfloat16"),
    *("output_attentions", "output_hidden_states", "_attn_implementation_autoset"),
    *("unsloth_fixed", "unsloth_version", "transformers.js_config", "is_llama_config"),
    *("chunk_size_feed_forward", "id2label", "label2id", "problem_type", "task_specific_params"),
    # Splits the same product into several: pretraining's way of summing.
    "pretraining_tp",
    # Read with use_sliding_window only, see _check_windows.
    *("sliding_window", "max_window_layers", "layer_types"),
}
"""Keys that change nothing of what is computed here."""

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
}
"""Parameters of each kind of rotary scaling: required, optional."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding."""

    kind: str = "default"
    theta: float = 10_000.0
    parameters: Mapping[str, float] = field(default_factory=dict)
    """Of the scaling, by the names that config.json uses."""


@dataclass(frozen=True)
class ModelConfig:
    """What the arithmetic needs to know of a decoder-only model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Rope
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    """Of the checkpoint: float32, bfloat16 or float16."""
    eos_ids: tuple[int, ...]
    """Token ids that end a text: those of config.json and generation_config.json together."""

    @property
    def context_length(self) -> int:
        """Tokens of the longest text the positions are made for."""
        if self.rope.kind != "yarn":
            return self.max_position_embeddings
        original = self.rope.parameters["original_max_position_embeddings"]
        stretched = int(original * self.rope.parameters["factor"])
        return max(self.max_position_embeddings, stretched)


def read_config(folder: Path) -> ModelConfig:
    """The configuration of the model in a folder. Raises ModelError that names the key."""
    raw = _read_json(folder / "config.json")
    if raw is None:
        raise ModelError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    generation = _read_json(folder / "generation_config.json") or {}
    architecture = _architecture(raw)
    _check_keys(raw)
    _check_windows(raw, architecture)
    heads = _positive(raw, "num_attention_heads")
    kv_heads = _positive(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} is no multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=_positive(raw, "hidden_size"),
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=_positive(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(raw, heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=_positive(raw, "max_position_embeddings"),
        rope=_rope(raw),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        dtype=_dtype(raw),
        eos_ids=tuple(sorted(_ids(raw, "eos_token_id") | _ids(generation, "eos_token_id"))),
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file, None where there is no file."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise ModelError(
            f"config.json: architectures {names} is not supported; "
            f"these are: {', '.join(ARCHITECTURES)}"
        )
    return known[0]


def _check_keys(raw: dict[str, Any]) -> None:
    """Refuse keys that are not understood, and values that are not implemented."""
    for key, value in raw.items():
        if key in ONLY:
            if value not in ONLY[key]:
                allowed = " or ".join(repr(good) for good in ONLY[key])
                raise ModelError(
                    f"config.json: {key} {value!r} is not implemented, only {allowed} is"
                )
        elif key not in COMPUTED | HARMLESS:
            raise ModelError(
                f"config.json: key {key!r} ({value!r:.80}) is unknown and may change the "
                "arithmetic; if it does not, remove it from the file"
            )


def _check_windows(raw: dict[str, Any], architecture: str) -> None:
    """Refuse sliding windows: Qwen has a switch for them, others have them by their mere size."""
    kinds = set(raw.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ModelError(
            f"config.json: layer_types {sorted(kinds)} is not implemented, only 'full_attention' is"
        )
    switched = "use_sliding_window" in raw or architecture.startswith("Qwen")
    if raw.get("sliding_window") is not None and not switched:
        raise ModelError(
            f"config.json: sliding_window {raw['sliding_window']!r} is not implemented"
        )


def _positive(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} is {value!r}, but has to be a positive integer")
    return value


def _head_dim(raw: dict[str, Any], heads: int) -> int:
    head_dim = _positive(raw, "head_dim", _positive(raw, "hidden_size") // heads)
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim {head_dim} is odd; rotary embedding needs pairs")
    return head_dim


def _rope(raw: dict[str, Any]) -> Rope:
    """From `rope_parameters`, or from `rope_scaling` and `rope_theta` as older files have it."""
    given = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    legacy = given.pop("type", "default")
    kind = given.pop("rope_type", legacy)
    theta = given.pop("rope_theta", raw.get("rope_theta") or 10_000.0)
    if kind not in ROPE_KEYS:
        raise ModelError(
            f"config.json: rope_type {kind!r} is not implemented, only {', '.join(ROPE_KEYS)} are"
        )
    required, optional = ROPE_KEYS[kind]
    if "original_max_position_embeddings" in required:
        given.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings"))
    given = {key: value for key, value in given.items() if value is not None}
    if given.pop("partial_rotary_factor", 1) != 1:
        raise ModelError("config.json: partial_rotary_factor is not implemented, only 1 is")
    if not all(isinstance(value, int | float) for value in (theta, *given.values())):
        raise ModelError(f"config.json: rope parameters {given} and theta {theta!r} are no numbers")
    missing, unknown = required - given.keys(), given.keys() - required - optional
    if missing or unknown:
        fault = f"lacks {sorted(missing)}" if missing else f"has unknown keys {sorted(unknown)}"
        raise ModelError(f"config.json: rope scaling {kind!r} {fault}")
    return Rope(kind, float(theta), given)


def _dtype(raw: dict[str, Any]) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in ("float32", "bfloat16", "float16"):
        raise ModelError(f"config.json: dtype {name!r} is not implemented")
    return name


def _ids(raw: dict[str, Any], key: str) -> set[int]:
    """The ids under a key, which may be one, a list or nothing."""
    value = raw.get(key)
    ids = value if isinstance(value, list) else [value] if value is not None else []
    if not all(isinstance(one, int) and one >= 0 for one in ids):
        raise ModelError(f"{key} is {value!r}, but has to be a token id or a list of them")
    return set(ids)
