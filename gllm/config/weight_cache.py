"""Folder and size limit of the cache of packed weights: the value of `--weight-cache`."""

import re
from dataclasses import dataclass
from pathlib import Path

from gllm.options.flags import output_folder, parse_bytes

MIN_LIMIT_BYTES = 2**20
_SIZE = re.compile(r" *[0-9][0-9.]* *[a-z]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class WeightCacheOptions:
    """Folder of packed weights."""

    folder: str
    limit_bytes: int | None = None
    """Largest size of all files together; None for half of the file system."""


def parse_weight_cache(text: str) -> WeightCacheOptions:
    """Parse FOLDER or FOLDER:SIZE, such as /var/cache/gllm:20GiB.

    Raises:
        ValueError: the folder is not an absolute path, or the size is not a number of bytes of at
            least a MiB.
    """
    folder, separator, size = text.rpartition(":")
    limit_bytes = None
    if separator and _SIZE.fullmatch(size):
        try:
            limit_bytes = parse_bytes(size)
        except ValueError:
            raise ValueError(f"{size!r} is not a size: give one such as 20GiB") from None
        if limit_bytes < MIN_LIMIT_BYTES:
            raise ValueError(
                f"the size {size} is less than a MiB: give one such as 20GiB, or leave it out for "
                "half of the file system"
            )
    else:
        folder = text
    if not Path(folder).is_absolute():
        raise ValueError(
            f"the folder {folder!r} is not an absolute path: give one, such as /var/cache/gllm or "
            "/dev/shm/gllm"
        )
    return WeightCacheOptions(folder, limit_bytes)


def check_weight_cache(text: str) -> str:
    """Return FOLDER or FOLDER:SIZE unchanged.

    Raises:
        ValueError: it is invalid, see `parse_weight_cache`, or the folder cannot be written.
    """
    output_folder(parse_weight_cache(text).folder)
    return text
