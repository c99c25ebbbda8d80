"""Names of the files in a folder of packed weights, and which of them are removed.

Decisions only: files are records, time is an argument. `weight_cache` reads and writes the folder.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

SUFFIX = ".weights"
TEMPORARY_SUFFIX = ".tmp"
"""End of the name of a file that is still being written."""
MAX_WRITE_SECONDS = 3600.0
"""Age at which a file that is still being written belongs to a process that has died."""
_NAME = re.compile(
    r"(?P<version>[0-9a-f]{16})-(?P<source>[0-9a-f]{16})-(?P<content>[0-9a-f]{16})"
    r"-(?P<variant>[0-9a-f]{32})" + re.escape(SUFFIX)
)


@dataclass(frozen=True, slots=True)
class PartName:
    """Name of a file with the packed weights of one part of a model, as digests."""

    version: str
    """Code that packed and reads it, 16 hexadecimal digits."""
    source: str
    """Path of the model, 16 digits."""
    content: str
    """The model's files, 16 digits."""
    variant: str
    """The part and everything else that decides its bytes, 32 digits."""

    def __str__(self) -> str:
        """Return the name of the file."""
        return f"{self.version}-{self.source}-{self.content}-{self.variant}{SUFFIX}"

    @staticmethod
    def parse(name: str) -> "PartName | None":
        """Return the parts of a file's name; None for a file that is not of a weight cache."""
        match = _NAME.fullmatch(name)
        return None if match is None else PartName(**match.groupdict())


@dataclass(frozen=True, slots=True)
class CachedFile:
    """File of the folder."""

    name: str
    num_bytes: int
    used_at: float
    """Time of its last use, or of the last write to it; seconds since the epoch."""

    @property
    def is_unfinished(self) -> bool:
        """True if the file was still being written when the folder was read."""
        stem = self.name.removeprefix(".").partition(SUFFIX)[0] + SUFFIX
        is_temporary = self.name.startswith(".") and self.name.endswith(TEMPORARY_SUFFIX)
        return is_temporary and PartName.parse(stem) is not None

    @property
    def is_own(self) -> bool:
        """True if a weight cache wrote the file; others are neither counted nor removed."""
        return self.is_unfinished or PartName.parse(self.name) is not None


def find_stale(files: Iterable[CachedFile], current: PartName, now: float) -> list[str]:
    """Return the names of files that nothing can use any more.

    They are of another version of the code, of earlier files of the same model, or unfinished and
    left behind by a process that has died.

    Args:
        files: files of the folder.
        current: name of any part of the model that is loaded; its variant does not matter.
        now: seconds since the epoch.
    """
    stale = []
    for file in files:
        if file.is_unfinished:
            if now - file.used_at > MAX_WRITE_SECONDS:
                stale.append(file.name)
            continue
        name = PartName.parse(file.name)
        if name is None:
            continue
        is_same_model = name.source == current.source
        if name.version != current.version or (is_same_model and name.content != current.content):
            stale.append(file.name)
    return stale


def find_evictions(
    files: Iterable[CachedFile], kept: Collection[str], needed_bytes: int, limit_bytes: int
) -> list[str] | None:
    """Return the names of the files to remove so that another one fits, least recently used first.

    Args:
        files: files of the folder.
        kept: names of files that may not be removed.
        needed_bytes: size of the new file.
        limit_bytes: largest size of all files together.

    Returns:
        None if the new file does not fit even so; then nothing should be removed.
    """
    own = [file for file in files if file.is_own]
    excess = sum(file.num_bytes for file in own) + needed_bytes - limit_bytes
    removable = [file for file in own if file.name not in kept and not file.is_unfinished]
    removed = []
    for file in sorted(removable, key=lambda file: (file.used_at, file.name)):
        if excess <= 0:
            break
        removed.append(file.name)
        excess -= file.num_bytes
    return removed if excess <= 0 else None
