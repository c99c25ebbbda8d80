"""Values that replace keys of the model's config.json, as in vLLM's `--hf-overrides`."""

import json
from collections.abc import Mapping
from typing import Any

OVERRIDES_HELP = (
    "JSON object whose values replace keys of the model's config.json, such as "
    '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}; null removes a key'
)
"""Help of the flag."""


def parse_hf_overrides(text: str) -> str | None:
    """Return a JSON object in a form without its spaces; None if it is empty. Raises ValueError."""
    try:
        values: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    return json.dumps(values, sort_keys=True) if values else None


def convert_hf_overrides(config: Any) -> None:
    """Convert the field `hf_overrides` of a configuration, which may be a mapping, to JSON.

    Raises ValueError that names the field.
    """
    value = config.hf_overrides
    try:
        if isinstance(value, Mapping):
            value = json.dumps(dict(value))
        text = parse_hf_overrides(value) if isinstance(value, str) and value else value or None
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"hf_overrides {config.hf_overrides!r:.80}: {error}") from None
    object.__setattr__(config, "hf_overrides", text)
