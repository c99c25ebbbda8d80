"""What a comparison measured, as it is kept in files.

Owns the records and their JSON. Knows nothing of how they are measured and shown.
"""

from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cpu.limits import Rates


class Row(msgspec.Struct, frozen=True):
    """One load on one peer, or one batch in it."""

    peer: str
    cell: str
    """The load's name."""
    round: int
    figures: dict[str, float]
    foreign: float
    """Share (0..1) of all cores that strangers used meanwhile."""
    pss: int = 0
    """Peak of the peer's memory meanwhile, bytes."""


class Results(msgspec.Struct):
    """One run of the comparison in one mode."""

    mode: str
    date: str
    command: str
    device: str
    asked: dict[str, Any]
    """The configuration."""
    versions: dict[str, str] = {}
    """By peer."""
    refused: dict[str, str] = {}
    """Peers that could not be measured, or not to the end, and why."""
    limits: list[Rates] = []
    """Measured in each round with one thread, then with all."""
    rows: list[Row] = []

    def save(self, path: Path) -> None:
        """Write the file, and its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def load(path: Path) -> Results:
    """The results of a file. Raises OSError as open does, ValueError for what is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no result of this comparison: {error}") from None
