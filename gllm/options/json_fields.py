"""Options whose value is a JSON object with the fields of a dataclass, as some flags of vLLM."""

import dataclasses
import json
from typing import Any


def parse_json_fields(kind: type, text: str) -> Any:
    """Return the dataclass whose fields a JSON object gives; null stands for a field's default.

    Raises:
        ValueError: the text is no JSON object, a field is unknown or missing, or a value is
            invalid.
    """
    try:
        values: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    return create_from_fields(kind, values)


def create_from_fields(kind: type, values: dict[str, Any]) -> Any:
    """Return the dataclass with some values; None stands for a field's default.

    Raises:
        ValueError: a field is unknown or missing, or a value is invalid.
    """
    values = {name: value for name, value in values.items() if value is not None}
    fields = {spec.name: spec for spec in dataclasses.fields(kind)}
    for name in values:
        if name not in fields:
            raise ValueError(f"there is no field {name!r:.100}; the fields are {', '.join(fields)}")
    for name, spec in fields.items():
        if name not in values and spec.default is dataclasses.MISSING:
            raise ValueError(f"{name} is missing")
    return kind(**values)
