"""Journal of measured times of tile sizes on one GPU, stored in a file.

`python -m gllm.kernels.tune` resumes from it. The first line names the GPU and the package
versions; each other line is one time.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from gllm.kernels.triton.tiles import TileRow, TilesError

Key = tuple[str, str, str]


class TuneJournal:
    """Measured times by table, row and tile sizes, stored in a file."""

    def __init__(self, path: Path, about: Mapping[str, object]) -> None:
        """Read the file, or start a new one if it is for another GPU or other versions.

        Drops a truncated last line.

        Raises:
            TilesError: The file is not a journal.
        """
        self._times: dict[Key, float | None] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        first = json.dumps(dict(about))
        if lines[:1] != [first]:
            lines = [first]
        kept = lines[:1]
        for number, line in enumerate(lines[1:], 2):
            try:
                entry = json.loads(line)
                key = entry["table"], _text(entry["up_to"]), _text(entry["use"])
                self._times[key] = entry["time"]
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines):
                    break
                raise TilesError(
                    f"{path}, line {number} is not a journal entry: {line:.80}"
                ) from error
            kept.append(line)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(kept) + "\n")
        self._path = path

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, key: tuple[str, TileRow, Mapping[str, int]]) -> bool:
        return _key(*key) in self._times

    def time(self, table: str, row: TileRow, use: Mapping[str, int]) -> float | None:
        """Return the measured time; None if the tile sizes do not run or give wrong results."""
        return self._times[_key(table, row, use)]

    def add(self, table: str, row: TileRow, use: Mapping[str, int], time: float | None) -> None:
        """Append a measurement to the file."""
        self._times[_key(table, row, use)] = time
        entry = {"table": table, "up_to": dict(row.up_to), "use": dict(use), "time": time}
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _key(table: str, row: TileRow, use: Mapping[str, int]) -> Key:
    return table, _text(row.up_to), _text(use)


def _text(numbers: Mapping[str, int]) -> str:
    return json.dumps(dict(numbers), sort_keys=True)
