"""The rotary position embedding of a configuration: its kind and parameters, checked.

Parameters keep the names of config.json; gllm/kernels/rotary.py computes with them.
"""

from collections.abc import Sequence
from typing import Any

from gllm.models.config_reader import ConfigReader, is_finite
from gllm.models.errors import ModelError
from gllm.models.spec.parts import QueryScaleSpec, RopeSpec
from gllm.options.options import INT32_MAX

ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": (set(), {"factor"}),
    "llama3": (
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        set(),
    ),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {
            "attention_factor",
            "attn_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        },
    ),
    "proportional": ({"rotated_pairs"}, {"factor"}),
    "longrope": (
        {"short_factor", "long_factor", "original_max_position_embeddings", "factor"},
        {"attention_factor", "short_mscale", "long_mscale"},
    ),
}
"""Parameters of each kind of rotary scaling: required, optional."""
LISTS = ("short_factor", "long_factor")
"""Parameters that are lists with one number for each pair."""
MIN_DIVISOR = 1e-6
"""Smaller divisors would make frequencies that are not finite."""
NOT_NEGATIVE = ("low_freq_factor", "mscale", "mscale_all_dim")
"""Parameters that may be 0; all others are above 0."""


def read_rope(
    config: ConfigReader,
    head_dim: int,
    interleaved: bool = False,
    partial: float | None = None,
    theta: float | None = None,
    layer_type: str | None = None,
    ignored: Sequence[str] = (),
) -> RopeSpec:
    """Read the rotary embedding of a model from config.json.

    The keys are `rope_parameters`, or `rope_scaling` and `rope_theta` in older files.

    Args:
        config: the model's configuration.
        head_dim: elements of a head.
        interleaved: True if neighbouring elements form pairs.
        partial: default of the share of a head that is rotated; None if it must be 1.
        theta: replaces the key `rope_theta`, unless `rope_parameters` sets it.
        layer_type: key within `rope_parameters` if each layer type has its own.
        ignored: further parameters, which the caller reads.

    Raises:
        ModelError: a parameter is invalid; the message names it.
    """
    given = _parameters(config, layer_type)
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    usual = config.default_of("rope_theta", 10_000.0)
    theta = given.pop("rope_theta", theta or config.finite_float("rope_theta", default=usual))
    share = given.pop("partial_rotary_factor", config.get("partial_rotary_factor", default=partial))
    kind = "longrope" if kind == "su" else kind
    if kind == "dynamic":
        theta = _stretch_base(given, theta, head_dim)
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise ModelError(
            f"config.json: rope_type {kind!r:.80} is not implemented, only "
            f"{', '.join(ROPE_KEYS)} are"
        )
    if kind == "proportional":
        # The frequencies are those of whole heads; the pairs beyond the share are not rotated.
        given["rotated_pairs"] = _rotated(config, head_dim, share, partial) // 2
        share = 1
    dim = _rotated(config, head_dim, share, partial)
    given = {key: value for key, value in given.items() if key not in ignored}
    _complete(given, kind, config)
    # YaRN divides by its logarithm.
    if not is_finite(theta) or theta < 1 or (theta == 1 and kind == "yarn"):
        rule = "above 1" if kind == "yarn" else "a finite number from 1 on"
        raise config.error(("rope_theta",), rule, theta)
    for name, value in given.items():
        _check(name, value, dim)
    _check_relations(given, kind)
    return RopeSpec(dim, kind, float(theta), given, interleaved)


def read_query_scale(config: ConfigReader) -> QueryScaleSpec | None:
    """Return the factor of late queries that the rotary parameters ask for; None if they do not."""
    given = _parameters(config, None)
    beta, period = given.get("llama_4_scaling_beta"), given.get("original_max_position_embeddings")
    if beta is None:
        return None
    if not is_finite(beta) or beta < 0:
        raise _error("llama_4_scaling_beta", beta, "0 or a positive number")
    if type(period) is not int or not 1 <= period <= INT32_MAX:
        raise _error("original_max_position_embeddings", period, "a positive integer")
    return QueryScaleSpec(float(beta), period)


def _stretch_base(given: dict[str, Any], theta: Any, head_dim: int) -> Any:
    """Return the base that dynamic scaling stretches by a fixed `alpha`, and remove that key.

    The factor of dynamic scaling changes only sequences beyond `max_position_embeddings`. Files
    with alpha also have keys of YaRN, which count for nothing.

    Source: the configurations published with Hunyuan.
    """
    alpha = given.pop("alpha", None)
    if alpha is None or not is_finite(theta):
        return theta
    if not is_finite(alpha) or alpha < 1:
        raise _error("alpha", alpha, "a finite number from 1 on")
    for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        given.pop(name, None)
    return theta * alpha ** (head_dim / (head_dim - 2))


def read_local_rope(
    config: ConfigReader, head_dim: int, theta: float, key: str | None = None
) -> RopeSpec:
    """Read the rotary embedding of layers with a sliding window, which `rope_scaling` leaves alone.

    Args:
        config: the model's configuration.
        head_dim: elements of a head.
        theta: base of the frequencies, unless `rope_parameters` sets it for these layers.
        key: key that replaces theta; None for none.
    """
    if key is not None:
        theta = config.finite_float(key, default=theta)
        if theta < 1:
            raise config.error((key,), "a finite number from 1 on", theta)
    by_type = config.get("rope_parameters")
    if isinstance(by_type, dict) and "sliding_attention" in by_type:
        return read_rope(config, head_dim, theta=theta, layer_type="sliding_attention")
    return RopeSpec(head_dim, theta=theta)


def _parameters(config: ConfigReader, layer_type: str | None) -> dict[str, Any]:
    """Return the parameters that are set."""
    usual = config.default_of("rope_parameters", {})
    given: Any = config.get("rope_scaling", "rope_parameters", default=usual)
    if isinstance(given, dict) and layer_type is not None and layer_type in given:
        given = given[layer_type]
    if not isinstance(given, dict):
        raise config.error(("rope_scaling", "rope_parameters"), "an object", given)
    return {key: value for key, value in given.items() if value is not None}


def _rotated(config: ConfigReader, head_dim: int, share: Any, partial: float | None) -> int:
    """Return the number of rotated elements of a head."""
    name = config.key("partial_rotary_factor")
    if share is None:
        share = 1
    if not is_finite(share) or not 0 < share <= 1:
        raise ModelError(f"config.json: {name} is {share!r:.80}, but has to be in (0, 1]")
    if partial is None and share != 1:
        raise ModelError(f"config.json: {name} {share!r} is not implemented here")
    dim = int(head_dim * share)
    if dim % 2 or not 0 < dim <= head_dim:
        raise ModelError(
            f"config.json: {name} {share!r}: {dim} of head_dim {head_dim} elements are to be "
            "rotated, but rotary embedding needs pairs"
        )
    return dim


def _complete(given: dict[str, Any], kind: str, config: ConfigReader) -> None:
    """Add parameters that other keys set; raise ModelError for missing or unknown ones."""
    required, optional = ROPE_KEYS[kind]
    if "original_max_position_embeddings" in required:
        longest = config.positive_int("max_position_embeddings")
        original = config.positive_int("original_max_position_embeddings", default=longest)
        original = given.setdefault("original_max_position_embeddings", original)
        if kind == "longrope" and isinstance(original, int) and original > 0:
            given.setdefault("factor", longest / original)
    else:
        config.ignore("original_max_position_embeddings")
        given.pop("original_max_position_embeddings", None)
    missing, unknown = required - given.keys(), given.keys() - required - optional
    if missing or unknown:
        fault = f"lacks {sorted(missing)}" if missing else f"has unknown keys {sorted(unknown)}"
        name = "rope_scaling" if config.has("rope_scaling") else "rope_parameters"
        raise ModelError(f"config.json: {name} {kind!r} {fault:.200}")


def _check(name: str, value: Any, dim: int) -> None:
    """Check one parameter: a positive number, or a list of one per pair."""
    if name == "truncate":
        if not isinstance(value, bool):
            raise _error(name, value, "true or false")
        return
    if name in LISTS:
        if not isinstance(value, list):
            raise _error(name, value, "a list of numbers")
        if len(value) != dim // 2:
            raise ModelError(
                f"config.json: rope parameter {name} has {len(value)} numbers, but "
                f"{dim // 2} pairs are rotated, by partial_rotary_factor"
            )
    for number in value if name in LISTS else [value]:
        if not is_finite(number):
            raise _error(name, number, "a finite number; it is no number of float32")
        if number < 0 or (number < MIN_DIVISOR and name not in NOT_NEGATIVE):
            raise _error(name, number, f"positive, at least {MIN_DIVISOR}")
    if name == "original_max_position_embeddings" and (
        type(value) is not int or not 1 < value <= INT32_MAX
    ):
        raise _error(name, value, "an integer above 1")


def _check_relations(given: dict[str, Any], kind: str) -> None:
    """Check parameters that depend on one another."""
    if kind == "llama3" and given["high_freq_factor"] < given["low_freq_factor"]:
        rule = f"at least low_freq_factor {given['low_freq_factor']!r}"
        raise _error("high_freq_factor", given["high_freq_factor"], rule)


def _error(name: str, value: Any, rule: str) -> ModelError:
    return ModelError(f"config.json: rope parameter {name} is {value!r:.80}, but has to be {rule}")
