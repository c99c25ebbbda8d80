"""Replace keys of a config.json by the values of `--hf-overrides`, nested ones included."""

from collections.abc import Mapping
from typing import Any

Config = dict[str, Any]
"""A config.json, or the configuration of a part in it."""
PART_SUFFIX = "_config"
"""End of the keys that hold the configuration of a part, such as text_config."""
VALUES = ("quantization_config", "compression_config")
"""Keys with that end whose objects are values."""
ROPE_KEYS = ("rope_parameters", "rope_scaling")
"""Keys of the rotary embedding's parameters: the newer one, and that of older files."""
ROPE_BASE_KEYS = ("rope_theta", "partial_rotary_factor")
"""Keys that older files have beside `rope_scaling`, and newer ones in `rope_parameters`."""


def apply_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Config:
    """Return a configuration in which the overrides replace keys, as in vLLM.

    The object of a part, such as text_config, is merged; any other object, such as rope_scaling,
    replaces the whole value. An override of `rope_scaling` or `rope_parameters` replaces either
    name, and leaves the base frequency as it is unless it sets it; `rope_theta` counts wherever the
    file has it.

    Args:
        config: Values of config.json; is not changed.
        overrides: The new values; null stands for an absent key.
    """
    result = dict(config)
    for key, value in overrides.items():
        old = result.get(key)
        is_part = key.endswith(PART_SUFFIX) and key not in VALUES
        if is_part and isinstance(old, Mapping) and isinstance(value, Mapping):
            result[key] = apply_overrides(old, value)
        elif key in ROPE_KEYS:
            _replace_rope(result, key, value)
        else:
            result[key] = value
    for key in ROPE_BASE_KEYS:
        parameters = result.get("rope_parameters")
        is_replaced = key in overrides and overrides.get("rope_parameters") is None
        if is_replaced and isinstance(parameters, Mapping) and key in parameters:
            result["rope_parameters"] = {**parameters, key: overrides[key]}
    return result


def _replace_rope(config: Config, key: str, value: object) -> None:
    """Replace the parameters of the rotary embedding, under whichever name the file has them."""
    old = [
        parameters for name in ROPE_KEYS if isinstance(parameters := config.pop(name, None), dict)
    ]
    base = {name: each[name] for each in old for name in ROPE_BASE_KEYS if name in each}
    if isinstance(value, Mapping):
        config[key] = base | dict(value)
    elif base:
        config["rope_parameters"] = base
    else:
        config[key] = value
