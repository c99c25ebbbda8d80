"""Times of kernel tiles on one GPU, kept in a file as they are measured.

Owns the file, by which `python -m gllm.kernels.tune` resumes: a line for each choice of tiles,
below a first line that names the GPU and the versions that the times hold for.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from gllm.kernels.triton.tiles import Row, TilesError

Key = tuple[str, str, str]


class Journal:
    """Measured times by table, row and tiles."""

    def __init__(self, path: Path, about: Mapping[str, object]) -> None:
        """Read the file, or begin a new one where it is about another GPU or other versions.

        A last line that was cut off is dropped. Raises TilesError for a file that is no journal.
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
                    f"{path}, line {number} is no time of tiles: {line:.80}"
                ) from error
            kept.append(line)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(kept) + "\n")
        self._path = path

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, key: tuple[str, Row, Mapping[str, int]]) -> bool:
        return _key(*key) in self._times

    def time(self, table: str, row: Row, use: Mapping[str, int]) -> float | None:
        """Return what was measured; None where the tiles do not run, or compute something wrong."""
        return self._times[_key(table, row, use)]

    def add(self, table: str, row: Row, use: Mapping[str, int], time: float | None) -> None:
        """Write a measurement down at once."""
        self._times[_key(table, row, use)] = time
        entry = {"table": table, "up_to": dict(row.up_to), "use": dict(use), "time": time}
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _key(table: str, row: Row, use: Mapping[str, int]) -> Key:
    return table, _text(row.up_to), _text(use)


def _text(numbers: Mapping[str, int]) -> str:
    return json.dumps(dict(numbers), sort_keys=True)
