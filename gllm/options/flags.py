"""Command-line flags of configuration dataclasses.

Builds a flag from each dataclass field, parses flags from the command line and from YAML files, and
builds the dataclass from the parsed values. A number out of its range is an error that names the
flag and the range.
"""

import argparse
import dataclasses
import difflib
import json
import math
import os
import sys
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gllm.options.flag_help import PART_HELP, FlagFormatter, HelpAction, group_name
from gllm.options.options import EntryChoices, Range, describe_range, number_type_of

LAYER_DIVISIONS = ("auto", "even")
"""Values of --layers besides numbers."""


class FlagParser(argparse.ArgumentParser):
    """Command-line parser with one-line errors, spelling suggestions and a `--config` file.

    The YAML file sets flags that the command line does not. Arguments as for ArgumentParser.
    """

    _config_action: argparse.Action | None = None
    _source = ""
    """Configuration file that is parsed, for errors."""

    def __init__(self, *, add_help: bool = True, **options: Any) -> None:
        super().__init__(**{"formatter_class": FlagFormatter, **options, "add_help": False})
        self.rare_flags: set[str] = set()
        """Destinations of the flags that `--help` leaves out."""
        if add_help:
            self.add_argument("-h", "--help", action=HelpAction, help=PART_HELP)

    @property
    def flags(self) -> list[argparse.Action]:
        """Flags and positional arguments, in the order of the help."""
        return list(self._actions)

    def add_config_flag(self) -> None:
        """Add `--config FILE`, a YAML file of flags that the command line overrides."""
        self._config_action = self.add_argument(
            "--config",
            metavar="FILE",
            help="YAML file of flags, such as `max-model-len: 4096`; the command line overrides it",
        )

    def error(self, message: str) -> typing.NoReturn:
        """Exit with status 2 and the message, without the usage."""
        source = f"--config {self._source}: " if self._source else ""
        self.exit(2, f"{self.prog}: error: {source}{message} (--help=all lists all flags)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; flags of the command line override those of the `--config` file."""
        given = sys.argv[1:] if args is None else list(args)
        if self._config_action is not None:
            given = [*self._flags_of_file(given), *given]
        values, extra = self.parse_known_args(given, namespace)
        if extra:
            hints = "".join(
                f"; {word.partition('=')[0]}: did you mean {match}?"
                for word in extra
                if word.startswith("--") and (match := self.closest(word.partition("=")[0]))
            )
            self.error(f"unrecognized arguments: {' '.join(extra)}{hints}")
        return values

    def _flags_of_file(self, given: list[str]) -> list[str]:
        """Return the flags that only the `--config` file sets, as arguments."""
        named = self._parse_given(given)
        path = getattr(named, "config", None)
        if path is None:
            return []
        arguments: list[str] = []
        try:
            keys: dict[str, str] = {}
            for key, value in read_flags(path).items():
                action = self.action_of(key)
                first = keys.setdefault(action.dest, key)
                if first != key:
                    raise ValueError(f"{first!r} and {key!r} set the same flag: keep one of them")
                if getattr(named, action.dest) is None:
                    flag = action.option_strings[0]
                    arguments += flag_arguments(flag, action, value, key)
            self._source = path
            self.parse_known_args(arguments, argparse.Namespace())
        except ValueError as error:
            self.error(f"--config {path}: {error}")
        finally:
            self._source = ""
        return arguments

    def _parse_given(self, given: list[str]) -> argparse.Namespace:
        """Return the values of a command line's flags, None for flags that it does not set."""
        blank = argparse.Namespace(**{action.dest: None for action in self.flags})
        return self.parse_known_args(given, blank)[0]

    def action_of(self, key: str) -> argparse.Action:
        """Return the flag of a key in a `--config` file. Raises ValueError for an unknown key."""
        flag = "--" + key.lstrip("-").replace("_", "-")
        action = self._option_string_actions.get(flag)
        if action is None or flag.startswith("--no-") or action.dest in ("help", "version"):
            match = self.closest(flag.replace("--no-", "--", 1))
            hint = f": did you mean {match.removeprefix('--')}?" if match else ""
            raise ValueError(f"there is no flag {key!r}{hint}")
        if action is self._config_action:
            raise ValueError("a file of flags cannot name another one")
        return action

    def closest(self, flag: str) -> str | None:
        """Return the flag with the most similar spelling, or None if none is similar."""
        known = [name for action in self.flags for name in action.option_strings]
        return next(iter(difflib.get_close_matches(flag, known, 1)), None)


def read_flags(path: str) -> dict[str, Any]:
    """Read a YAML file of flag values and return them by flag name.

    If the file has a section `configuration`, as benchmark result files have, that section is
    returned.

    Raises:
        ValueError: The file cannot be read or is not a mapping.
    """
    # Imported late: most runs have no such file.
    import yaml

    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8"))
        root = loader.get_single_node()
        _check_keys(root)
        values = None if root is None else loader.construct_document(root)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"cannot be read: {why}") from None
    except RepeatedKeyError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"is not YAML: {' '.join(str(error).split())}") from None
    values = {} if values is None else values
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError("has to be a mapping of flags to values, such as `max-model-len: 4096`")
    section = values.get("configuration")
    return section if isinstance(section, dict) else values


class RepeatedKeyError(ValueError):
    """A mapping in a YAML file has one key twice; PyYAML would silently use the last value."""


def _check_keys(root: Any) -> None:
    """Raise RepeatedKeyError if a mapping in a YAML document has one key twice.

    Args:
        root: The document's root node; None if it is empty.
    """
    pending, seen = [root], set[int]()
    while pending:
        node = pending.pop()
        if node is None or id(node) in seen or not isinstance(node.value, list):
            continue
        seen.add(id(node))  # an alias is the node that it refers to
        if node.id == "sequence":
            pending += node.value
            continue
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            pending.append(value)
            line = key.start_mark.line + 1
            if key.id == "scalar":
                if (key.tag, key.value) in lines:
                    first = lines[key.tag, key.value]
                    raise RepeatedKeyError(
                        f"has {key.value!r} twice, in lines {first} and {line}: keep one of them"
                    )
                lines[key.tag, key.value] = line


def flag_arguments(flag: str, action: argparse.Action, value: object, key: str) -> list[str]:
    """Convert the value of a flag in a YAML file to command-line arguments.

    null becomes no argument. The items of a list are joined by commas, or repeat the flag if it is
    repeatable. true and false switch flags that can be given without a value.

    Args:
        flag: Flag with dashes, as in `--host`.
        action: argparse action of the flag.
        value: Value in the file.
        key: Key in the file, for error messages.

    Raises:
        ValueError: The flag cannot have such a value.
    """
    if value is None:
        return []
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ValueError(f"{key} is {value!r:.100}, but has to be true or false")
        return [flag if value else "--no-" + flag.removeprefix("--")]
    if action.nargs == "?" and isinstance(value, bool):
        return [flag] if value else []
    parts = value if isinstance(value, list) else [value]
    if not all(type(part) in (int, float, str) for part in parts):
        raise ValueError(
            f"{key} is {value!r:.100}, but has to be a number, text or a list of these (quotes "
            "make text of words as yes, no, on and off)"
        )
    texts = [str(part) for part in parts]
    if action.nargs == "+":
        return [flag, *texts]
    if type(action).__name__ != "_AppendAction":
        texts = [",".join(texts)]
    return [f"{flag}={text}" for text in texts]


class FlagType:
    """Callable `type` of an argparse flag, which parses the text and checks the range of numbers.

    Args:
        parse: Converts the text to the value; a ValueError becomes the flag's error message.
        kind: int or float for numbers and tuples of numbers; None for other values.
        allowed: Range of the number, or of each number of a tuple.
    """

    def __init__(
        self, parse: Callable[[str], Any], kind: type | None = None, allowed: Range | None = None
    ) -> None:
        self._parse = parse
        self.kind = kind
        self.range = allowed

    def __call__(self, text: str) -> Any:
        """Return the value. Raises ArgumentTypeError, to which argparse adds the flag."""
        rule = (
            "" if self.kind is None or self.range is None else describe_range(self.kind, self.range)
        )
        try:
            value = self._parse(text)
        except (ValueError, TypeError, ArithmeticError) as error:
            why = f"has to be {rule}" if rule else f"cannot be used: {error}"
            raise argparse.ArgumentTypeError(f"{text[:100]!r} {why}") from None
        # A word in place of numbers was checked by the parser.
        if self.range is not None and not isinstance(value, str):
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(number in self.range for number in numbers):
                raise argparse.ArgumentTypeError(f"{text[:100]!r} has to be {rule}")
        return value


def number_type(
    kind: type, *, ge: float | None = None, gt: float | None = None, le: float | None = None
) -> FlagType:
    """Return an argparse `type` that accepts one number within bounds.

    Args:
        kind: int or float.
        ge: Least allowed value.
        gt: Exclusive lower bound.
        le: Largest allowed value.
    """
    return FlagType(kind, kind, Range(ge, gt, le))


def parse_bytes(text: str) -> int:
    """Parse a size such as '512MiB', '2GiB', '1.5GB' or '1024', return bytes. Raises ValueError."""
    units = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 1e3, "mb": 1e6, "gb": 1e9, "b": 1}
    lowered = text.strip().lower()
    for unit, factor in units.items():
        if lowered.endswith(unit):
            number = float(lowered[: -len(unit)]) * factor
            if not math.isfinite(number):
                raise ValueError(f"{text!r} is not a number of bytes")
            return int(number)
    return int(lowered)


def parse_counts(text: str) -> tuple[int, ...]:
    """Parse integers that are separated by commas, such as '10,14'. Raises ValueError."""
    return tuple(int(part) for part in text.split(","))


def parse_layers(text: str) -> tuple[int, ...] | str:
    """Parse layers per stage, such as '10,14', 'auto' or 'even'. Raises ValueError."""
    return text if text in LAYER_DIVISIONS else parse_counts(text)


def parse_floats(text: str) -> tuple[float, ...]:
    """Parse numbers that are separated by commas, such as '1,2.5'. Raises ValueError."""
    return tuple(float(part) for part in text.split(","))


def parse_list(text: str) -> tuple[str, ...]:
    """Split a text such as 'a:1,b:2' at its commas; empty items are left out."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_url(text: str) -> str:
    """Check that a text is an http or https URL with a host, and return it. Raises ValueError."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or any(not "!" <= char <= "~" for char in text):
        raise ValueError("it is not a URL such as http://127.0.0.1:8000")
    return text


def input_file(text: str) -> str:
    """Check that a file can be read, and return its path. Raises ValueError."""
    try:
        with open(text, "rb"):
            return text
    except OSError as error:
        raise ValueError(str(error.strerror)) from None


def output_file(text: str) -> str:
    """Check that a file can be written, and return its path. Raises ValueError.

    The folder has to exist. The file is not created or changed.
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
    """Check that a folder can be written or created, and return its path. Raises ValueError."""
    path = Path(text).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder")
    if not os.access(path, os.W_OK):
        raise ValueError(f"{path} cannot be written: permission denied")
    return text


def add_flags(
    parser: argparse.ArgumentParser,
    config: type,
    exclude: Collection[str] = (),
    takes_entries: bool = False,
    are_rare: bool = False,
) -> None:
    """Add a command-line flag for each field of a configuration dataclass and its nested ones.

    Only fields that `option` declares have flags. Those of a class are a group of the help. If some
    of them are declared as common, `--help` leaves out the others, and those of nested classes.

    Args:
        parser: Parser to which the flags are added.
        config: Configuration dataclass.
        exclude: Names of fields without a flag.
        takes_entries: Flags whose choices are EntryChoices also accept `module:Class`.
        are_rare: Leave out flags that are not common, even if no flag of the class is.
    """
    hints = typing.get_type_hints(config)
    group = parser.add_argument_group(group_name(config.__name__))
    are_rare |= any(spec.metadata.get("is_common") for spec in dataclasses.fields(config))
    for spec in dataclasses.fields(config):
        if dataclasses.is_dataclass(hints[spec.name]):
            nested = typing.cast(type, hints[spec.name])
            add_flags(parser, nested, exclude, takes_entries, are_rare)
        elif "help" in spec.metadata and spec.name not in exclude:
            flags = spec.metadata.get("flags", ("--" + spec.name.replace("_", "-"),))
            options = _flag_options(spec, hints[spec.name])
            if isinstance(options.get("choices"), EntryChoices):
                if takes_entries:
                    options["help"] += "; or module:Class, a class of your own"
                else:
                    options["choices"] = tuple(options["choices"])
            group.add_argument(*flags, dest=spec.name, **options)
            if are_rare and not spec.metadata.get("is_common") and isinstance(parser, FlagParser):
                parser.rare_flags.add(spec.name)


def config_from_flags(
    config: type, values: argparse.Namespace, exclude: Collection[str] = ()
) -> Any:
    """Create a configuration dataclass from parsed command-line flags.

    Args:
        config: Configuration dataclass.
        values: Result of the parser to which `add_flags` has added its flags.
        exclude: Names of fields that keep their defaults.

    Raises:
        ValueError: A value is invalid.
    """
    hints = typing.get_type_hints(config)
    given = {}
    for spec in dataclasses.fields(config):
        if dataclasses.is_dataclass(hints[spec.name]):
            given[spec.name] = config_from_flags(
                typing.cast(type, hints[spec.name]), values, exclude
            )
        elif "help" in spec.metadata and spec.name not in exclude:
            value = getattr(values, spec.name)
            given[spec.name] = tuple(value or ()) if "repeat" in spec.metadata else value
    return config(**given)


def flags_of_config(config: Any) -> dict[str, Any]:
    """Return the values of a configuration by flag name, as in a YAML file for `--config`.

    Fields that are None are left out, because that is the default of their flags.
    """
    flags: dict[str, Any] = {}
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        name = spec.name.replace("_", "-")
        if "help" in spec.metadata and value is not None:
            flags[name] = list(value) if isinstance(value, tuple) else value
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                flags[name] = json.dumps(dataclasses.asdict(value))
        elif dataclasses.is_dataclass(value):
            flags |= flags_of_config(value)
    return flags


def _flag_options(spec: "dataclasses.Field[Any]", hint: Any) -> dict[str, Any]:
    """Return argparse's options of one field: default, type, choices and help."""
    text = spec.metadata["help"]
    if spec.default not in (None, ()) and "default" not in text:
        text += f" (default {spec.default})"
    options: dict[str, Any] = {"default": spec.default, "help": text.replace("%", "%%")}
    if hint is bool:
        return options | {"action": argparse.BooleanOptionalAction}
    if "repeat" in spec.metadata:
        # argparse appends to the default, which cannot be a tuple.
        options |= {"action": "append", "default": None}
    kind = number_type_of(hint)
    parse = spec.metadata.get("parse", kind or str)
    options["type"] = FlagType(parse, kind, spec.metadata.get("range"))
    if "bare" in spec.metadata:
        options |= {"nargs": "?", "const": spec.metadata["bare"]}
    if "choices" in spec.metadata:
        options["choices"] = spec.metadata["choices"]
    else:
        options["metavar"] = spec.name.upper()
    return options
