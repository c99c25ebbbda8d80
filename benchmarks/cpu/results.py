"""Results of a comparison and their JSON files."""

from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cpu.limits import Rates


class Row(msgspec.Struct, frozen=True):
    """Figures of one load on one peer, or of one batch in process."""

    peer: str
    cell: str
    """The load's name."""
    round: int
    figures: dict[str, float]
    foreign: float
    """CPU share (0..1) of all cores that other processes used during the measurement."""
    pss: int = 0
    """Peak memory of the peer, in bytes."""


class Results(msgspec.Struct):
    """One run of the comparison in one mode."""

    mode: str
    date: str
    command: str
    device: str
    asked: dict[str, Any]
    """The configuration."""
    versions: dict[str, str] = {}
    """Version by peer."""
    file_bytes: dict[str, int] = {}
    """Size by peer, for peers whose model is a file."""
    refused: dict[str, str] = {}
    """Reason by peer, for peers that could not be measured completely."""
    limits: list[Rates] = []
    """Rates measured in each round, with one thread and with all threads."""
    rows: list[Row] = []

    def save(self, path: Path) -> None:
        """Write the file and create its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def load(path: Path) -> Results:
    """Load the results from a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file has no results of this comparison.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no result of this comparison: {error}") from None
