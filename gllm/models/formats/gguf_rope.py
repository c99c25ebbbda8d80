"""Rotary embedding of a GGUF file, in the keys of config.json.

Source: ggml's docs/gguf.md; llama.cpp's converter for the meaning of YaRN's keys.
"""

from typing import Any

from gllm.models.errors import ModelError
from gllm.models.formats.gguf_header import GgufHeader

Config = dict[str, Any]
"""Content of config.json, or a part of it."""


def read_gguf_rope(model: GgufHeader) -> Config:
    """Return the base and the scaling of the rotary embedding."""
    config: Config = {"rope_theta": model.number("rope.freq_base", 10_000.0)}
    kind = model.metadata.text(model.key("rope.scaling.type"), "linear")
    factor = model.number("rope.scaling.factor", model.number("rope.scale_linear", 1.0)) or 1.0
    context = model.integer("context_length")
    original = model.integer("rope.scaling.original_context_length", context)
    factors = _rope_factors(model, original)
    if factors:
        return config | {"rope_scaling": factors}
    if kind == "yarn":
        return config | {"rope_scaling": _yarn(model, factor, original)}
    if kind not in ("linear", "none"):
        raise ModelError(
            f"{model.path}: {model.key('rope.scaling.type')} {kind!r:.80} is not implemented "
            "without tensors of factors: use another model"
        )
    if kind == "linear" and factor != 1.0:
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return config


def _rope_factors(model: GgufHeader, original: int) -> Config | None:
    """Return the scaling by one factor per pair of elements; None if the file has no factors.

    Files have one list for Llama 3.1, two for LongRoPE: for short and for long contexts.
    """
    names = ("rope_factors_short.weight", "rope_factors_long.weight")
    attention_factor = model.number("rope.scaling.attn_factor", 0.0)
    if model.has_tensor("rope_freqs.weight"):
        names, attention_factor = ("rope_freqs.weight",) * 2, 1.0
    if not all(map(model.has_tensor, names)):
        return None
    short, long = (model.read_numbers(name) for name in names)
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        **({"attention_factor": attention_factor} if attention_factor else {}),
    }


def _yarn(model: GgufHeader, factor: float, original: int) -> Config:
    """Return the parameters of YaRN."""
    scaling: Config = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    extrapolation = model.key("rope.scaling.yarn_ext_factor")
    if model.metadata.number(extrapolation, 1.0) not in (1.0, -1.0):
        raise model.metadata.error(extrapolation, "1, the only value that is implemented")
    for key, name in (
        ("yarn_attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if model.has(f"rope.scaling.{key}"):
            scaling[name] = model.number(f"rope.scaling.{key}")
    if model.has("rope.scaling.yarn_log_multiplier"):
        # Of DeepSeek, whose two factors are equal and cancel each other but for attention's scale.
        temperature = round(model.number("rope.scaling.yarn_log_multiplier") / 0.1, 6)
        scaling |= {"mscale": temperature, "mscale_all_dim": temperature}
    return scaling
