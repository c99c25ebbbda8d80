"""Value of `--kv-cache-disk`: folder and size of the prefix cache's disk tier."""

import os
from pathlib import Path
from typing import NamedTuple

from gllm.options.flags import output_folder, parse_bytes

MIN_BYTES = 2**20
"""Least size of the disk tier."""


class KvDiskSpace(NamedTuple):
    """Folder on each machine that keeps KV blocks, and the bytes that they may take there."""

    folder: Path
    max_bytes: int


def parse_kv_disk(text: str) -> KvDiskSpace:
    """Parse PATH:SIZE, such as /var/cache/gllm:20GiB. Raises ValueError that names the fix."""
    path, separator, size = text.rpartition(":")
    if not separator or not path:
        raise ValueError(f"{text!r} has to be PATH:SIZE, such as /var/cache/gllm:20GiB")
    try:
        max_bytes = parse_bytes(size)
    except ValueError:
        raise ValueError(f"{size!r} is not a size such as 20GiB") from None
    if max_bytes < MIN_BYTES:
        raise ValueError(f"a size of {max_bytes} bytes is too small: give 1MiB or more")
    return KvDiskSpace(Path(os.path.abspath(path)), max_bytes)


def check_kv_disk(text: str) -> str:
    """Check PATH:SIZE, whose folder has to be writable or creatable, and return it.

    Raises ValueError.
    """
    output_folder(str(parse_kv_disk(text).folder))
    return text
