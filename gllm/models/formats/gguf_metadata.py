"""Reader of a GGUF file's metadata that checks the type of every value.

Errors name the file, the key and what it has to be.
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gllm.models.errors import ModelError

log = logging.getLogger(__name__)

REMEDY = "convert the model again, or choose another file of it"
"""End of errors about a value that only a converter can write."""


class GgufMetadata:
    """Values of a file's metadata; methods raise ModelError that names the key.

    Args:
        path: the file, for errors.
        values: the metadata by key.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values
        self.read: set[str] = set()
        """Keys that were read."""
        self._warned: set[str] = set()

    def get(self, key: str) -> Any:
        """Return a value unchecked; None if the file lacks the key."""
        self.read.add(key)
        return self._values.get(key)

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix, in the file's order."""
        return [key for key in self._values if key.startswith(prefix)]

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.error(key, "a text")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer; a list with one equal value per layer counts as that value.

        Raises:
            ModelError: the value is no integer, or is absent and there is no default.
        """
        value = self._scalar(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._scalar(key)
        if value is None and default is not None:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise self.error(key, "a finite number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of texts."""
        value = self.get(key)
        if not isinstance(value, list) or not value or not isinstance(value[0], str):
            raise self.error(key, "a list of texts")
        return value

    def numbers(self, key: str, count: int) -> list[float]:
        """Return a list of `count` numbers."""
        value = self.get(key)
        is_list = isinstance(value, list) and len(value) == count
        if not is_list or isinstance(value[0], str | bool):
            raise self.error(key, f"a list of {count} numbers")
        return list(value)

    def warn(self, key: str, text: str) -> None:
        """Write a warning about a key to the log, once."""
        if key not in self._warned:
            self._warned.add(key)
            log.warning("%s: %s %s", self.path, key, text)

    def error(self, key: str, rule: str) -> ModelError:
        """Return the error for a key that violates a rule."""
        value = self._values.get(key)
        if value is None:
            return ModelError(f"{self.path} lacks the key {key!r}, {rule}: {REMEDY}")
        shown = f"a list of {len(value)}" if isinstance(value, list) else f"{value!r:.80}"
        return ModelError(f"{self.path}: {key} is {shown}, but has to be {rule}: {REMEDY}")

    def _scalar(self, key: str) -> Any:
        value = self.get(key)
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                raise ModelError(
                    f"{self.path}: {key} differs between layers, which is not implemented: use "
                    "another model"
                )
            return value[0]
        return value
