"""Values FOLDER and FOLDER:SIZE, of `--weight-cache` and `--kv-cache-disk`."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gllm.options.flags import output_folder, parse_bytes

MIN_BYTES = 2**20
"""Least size."""
_SIZE = re.compile(r" *[-0-9][0-9.]* *[a-z]*", re.IGNORECASE)


class SizedFolder(NamedTuple):
    """Folder on each machine, and the bytes that its files may take together."""

    folder: Path
    """An absolute path: other processes have other working directories."""
    max_bytes: int | None = None
    """None for a size that the user of the folder chooses."""

    def __str__(self) -> str:
        """Return the value that is parsed to this."""
        return str(self.folder) if self.max_bytes is None else f"{self.folder}:{self.max_bytes}"


def parse_sized_folder(text: str, needs_size: bool = False) -> SizedFolder:
    """Parse FOLDER or FOLDER:SIZE, such as /var/cache/gllm:20GiB.

    Args:
        text: the value. A folder may have a colon in its name.
        needs_size: True if the size may not be left out.

    Raises:
        ValueError: there is no folder, or the size is missing, invalid or less than a MiB.
    """
    folder, separator, size = text.rpartition(":")
    if not (separator and _SIZE.fullmatch(size)):
        folder, size = text, ""
    if not folder or (needs_size and not size):
        form = "FOLDER:SIZE" if needs_size else "FOLDER or FOLDER:SIZE"
        raise ValueError(f"{text!r} has to be {form}, such as /var/cache/gllm:20GiB")
    max_bytes = None
    if size:
        try:
            max_bytes = parse_bytes(size)
        except ValueError:
            raise ValueError(f"{size!r} is not a size: give one such as 20GiB") from None
        if max_bytes < MIN_BYTES:
            raise ValueError(f"the size {size} is less than a MiB: give one such as 20GiB")
    return SizedFolder(Path(os.path.abspath(folder)), max_bytes)


def check_sized_folder(needs_size: bool = False) -> Callable[[str], str]:
    """Return a parser of a flag that returns its text unchanged.

    It raises ValueError for an invalid value, see `parse_sized_folder`, and for a folder that
    cannot be written or created.
    """

    def check(text: str) -> str:
        output_folder(str(parse_sized_folder(text, needs_size).folder))
        return text

    return check
