"""Command-line flags of configuration dataclasses.

Owns the way from a dataclass field to a flag and from parsed flags to the dataclass.
"""

import argparse
import dataclasses
import typing
from typing import Any


def parse_bytes(text: str) -> int:
    """Bytes from '512MiB', '2GiB', '1.5GB' or a plain number. Raises ValueError."""
    units = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 1e3, "mb": 1e6, "gb": 1e9, "b": 1}
    lowered = text.strip().lower()
    for unit, factor in units.items():
        if lowered.endswith(unit):
            return int(float(lowered[: -len(unit)]) * factor)
    return int(lowered)


def parse_layers(text: str) -> tuple[int, ...]:
    """Layers of each stage from '10,14'. Raises ValueError."""
    return tuple(int(part) for part in text.split(","))


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """One flag for each field of a configuration dataclass, nested ones included."""
    hints = typing.get_type_hints(config)
    for spec in dataclasses.fields(config):
        if dataclasses.is_dataclass(hints[spec.name]):
            add_flags(parser, typing.cast(type, hints[spec.name]))
        elif "help" in spec.metadata:
            flags = spec.metadata.get("flags", ("--" + spec.name.replace("_", "-"),))
            parser.add_argument(*flags, dest=spec.name, **_flag_options(spec, hints[spec.name]))


def from_flags(config: type, values: argparse.Namespace) -> Any:
    """The configuration that parsed flags describe. Raises ValueError as its fields' checks do."""
    hints = typing.get_type_hints(config)
    given = {}
    for spec in dataclasses.fields(config):
        if dataclasses.is_dataclass(hints[spec.name]):
            given[spec.name] = from_flags(typing.cast(type, hints[spec.name]), values)
        elif "help" in spec.metadata:
            value = getattr(values, spec.name)
            given[spec.name] = tuple(value or ()) if "repeat" in spec.metadata else value
    return config(**given)


def _flag_options(spec: "dataclasses.Field[Any]", hint: Any) -> dict[str, Any]:
    """What argparse needs for one field: default, type, choices, help with the default."""
    text = spec.metadata["help"]
    if spec.default not in (None, ()) and "default" not in text:
        text += f" (default {spec.default})"
    options: dict[str, Any] = {"default": spec.default, "help": text.replace("%", "%%")}
    if hint is bool:
        return options | {"action": argparse.BooleanOptionalAction}
    if "repeat" in spec.metadata:
        # argparse appends to the default, which a tuple does not take.
        options |= {"action": "append", "default": None}
    plain = next((t for t in (int, float, str) if t in (hint, *typing.get_args(hint))), str)
    options["type"] = spec.metadata.get("parse", plain)
    if "choices" in spec.metadata:
        options["choices"] = spec.metadata["choices"]
    else:
        options["metavar"] = spec.name.upper()
    return options
