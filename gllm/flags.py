"""Command-line flags of configuration dataclasses.

Owns the way from a dataclass field to a flag, from a flag's text to its value, and from parsed
flags to the dataclass. A number out of its range is an error that names the flag and the range.
"""

import argparse
import dataclasses
import difflib
import math
import os
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gllm.scheduler.options import Range, describe, number_kind


class FlagParser(argparse.ArgumentParser):
    """A parser whose errors are one line, which names the flag and suggests one for an unknown."""

    def error(self, message: str) -> typing.NoReturn:
        """Exit with status 2 and the message, without the usage that would bury it."""
        self.exit(2, f"{self.prog}: error: {message} (--help lists all flags)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As of ArgumentParser."""
        values, extra = self.parse_known_args(args, namespace)
        if extra:
            hints = "".join(
                f"; {word.partition('=')[0]}: did you mean {match}?"
                for word in extra
                if word.startswith("--") and (match := self.closest(word.partition("=")[0]))
            )
            self.error(f"unrecognized arguments: {' '.join(extra)}{hints}")
        return values

    def closest(self, flag: str) -> str | None:
        """Return the flag that is spelled most alike, None where none is."""
        known = [name for action in self._actions for name in action.option_strings]
        return next(iter(difflib.get_close_matches(flag, known, 1)), None)


class FlagType:
    """The `type` of a flag: parses its text and checks the range of numbers.

    kind: int or float for flags of numbers, which need a range; None for others.
    parse: from text to the value; a ValueError becomes the flag's error.
    """

    def __init__(
        self, parse: Callable[[str], Any], kind: type | None = None, allowed: Range | None = None
    ) -> None:
        self._parse = parse
        self.kind = kind
        self.range = allowed

    def __call__(self, text: str) -> Any:
        """Return the value. Raises ArgumentTypeError, before which argparse puts the flag."""
        rule = "" if self.kind is None or self.range is None else describe(self.kind, self.range)
        try:
            value = self._parse(text)
        except (ValueError, TypeError, ArithmeticError) as error:
            why = f"has to be {rule}" if rule else f"cannot be used: {error}"
            raise argparse.ArgumentTypeError(f"{text[:100]!r} {why}") from None
        if self.range is not None:
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(number in self.range for number in numbers):
                raise argparse.ArgumentTypeError(f"{text[:100]!r} has to be {rule}")
        return value


def number(
    kind: type,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> FlagType:
    """Return the type of a flag for one number in a range."""
    return FlagType(kind, kind, Range(ge, gt, le, lt))


def parse_bytes(text: str) -> int:
    """Return bytes from '512MiB', '2GiB', '1.5GB' or a plain number. Raises ValueError."""
    units = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 1e3, "mb": 1e6, "gb": 1e9, "b": 1}
    lowered = text.strip().lower()
    for unit, factor in units.items():
        if lowered.endswith(unit):
            number = float(lowered[: -len(unit)]) * factor
            if not math.isfinite(number):
                raise ValueError(f"{text!r} is no number of bytes")
            return int(number)
    return int(lowered)


def parse_layers(text: str) -> tuple[int, ...]:
    """Return the layers of each stage from '10,14'. Raises ValueError."""
    return tuple(int(part) for part in text.split(","))


def parse_url(text: str) -> str:
    """Return the URL of a server. Raises ValueError unless it has http or https and a host."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or any(not "!" <= char <= "~" for char in text):
        raise ValueError("it is not a URL as http://127.0.0.1:8000")
    return text


def input_file(text: str) -> str:
    """Return the path of a file to read. Raises ValueError that says why it cannot be read."""
    try:
        with open(text, "rb"):
            return text
    except OSError as error:
        raise ValueError(str(error.strerror)) from None


def output_file(text: str) -> str:
    """Return the path of a file to write. Raises ValueError that says why it cannot be written.

    The folder has to exist. Nothing is written.
    """
    path = Path(text)
    if path.is_dir():
        raise ValueError("it is a folder, but a file is needed")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError("it cannot be written: permission denied")
    return text


def output_folder(text: str) -> str:
    """Return the path of a folder to write to, which may be made later. Raises ValueError."""
    path = Path(text).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder")
    if not os.access(path, os.W_OK):
        raise ValueError(f"{path} cannot be written: permission denied")
    return text


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
    kind = number_kind(hint)
    parse = spec.metadata.get("parse", kind or str)
    options["type"] = FlagType(parse, kind, spec.metadata.get("range"))
    if "choices" in spec.metadata:
        options["choices"] = spec.metadata["choices"]
    else:
        options["metavar"] = spec.name.upper()
    return options
