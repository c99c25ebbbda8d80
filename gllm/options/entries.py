"""Load user-defined classes that flags name as `module:Class`."""

import importlib
from collections.abc import Sequence
from typing import Any


def load_entry(flag: str, entry: str, members: Sequence[str], fix: str) -> Any:
    """Import a user-defined class that a flag names as `module:Class`, and return it.

    Args:
        flag: Name of the flag, for error messages.
        entry: Value of the flag, `module:Class`.
        members: Names of the methods and attributes that the class must have.
        fix: Advice for a class that lacks a member, for the error message.

    Raises:
        ValueError: There is no such class, or it lacks a member; the message names the fix.
    """
    name, _, class_name = entry.partition(":")
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{flag} {entry}: module {name} cannot be imported ({error}): run `python -m gllm` in "
            "the folder that has it, or add this folder to PYTHONPATH"
        ) from error
    loaded = getattr(module, class_name, None)
    if not isinstance(loaded, type):
        fitting = (n for n, member in vars(module).items() if not _missing(member, members))
        raise ValueError(
            f"{flag} {entry}: module {name} has no class {class_name}: choose from "
            f"{', '.join(sorted(fitting)) or 'another module, this one has none that fits'}"
        )
    if missing := _missing(loaded, members):
        raise ValueError(
            f"{flag} {entry}: class {class_name} of module {name} lacks {', '.join(missing)}: {fix}"
        )
    return loaded


def _missing(member: object, members: Sequence[str]) -> list[str]:
    """Return the names that a class lacks; all of them for another object."""
    return [name for name in members if not (isinstance(member, type) and hasattr(member, name))]
