"""Which tiles, warps and stages a kernel is launched with: tables, read from files.

Owns the files' format (tuned/*.json) and which file is for which GPU. `tuned/default.json` says
what is used where nothing else is known; its rows are all that there are. The file of a GPU, found
by its name, else by its architecture, replaces some of them; `python -m gllm.kernels.tune` writes
it (gllm/kernels/tune.py). Does not know what kernels compute.

A table has rows in order. A row is for sizes up to its `up_to`; the first that fits is used.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "tuned"
DEFAULT = "default"
LIMITS = {
    "rows": (16, 256),
    "keys": (16, 256),
    "columns": (16, 256),
    "inner": (16, 256),
    "elements": (16, 65_536),
    "groups": (1, 64),
    "warps": (1, 32),
    "stages": (1, 8),
}
"""Least and largest of each choice; all but stages are powers of two."""
ABOUT = {"device": str, "architecture": int, "timed": bool, "how": str, "date": str}
"""What a file says of itself, by the types; architecture 0 stands for every one."""

Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Row:
    """One choice."""

    up_to: Mapping[str, int]
    """Largest sizes that it is for; a size that is not named may be any."""
    use: Mapping[str, int]
    """By names of LIMITS."""

    def fits(self, sizes: Mapping[str, int]) -> bool:
        """Whether it is for these sizes."""
        return all(sizes[name] <= most for name, most in self.up_to.items())


Tables = Mapping[str, Sequence[Row]]


@dataclass(frozen=True)
class File:
    """The content of one file."""

    device: str
    architecture: int
    timed: bool
    how: str
    """The command that made it, or what it was chosen by."""
    date: str
    versions: Mapping[str, str]
    tables: Tables

    def text(self) -> str:
        """The file, a row on a line."""
        about = {name: getattr(self, name) for name in (*ABOUT, "versions")}
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in about.items()]
        tables = []
        for name, rows in self.tables.items():
            listed = [f"      {json.dumps({'up_to': row.up_to, **row.use})}" for row in rows]
            tables.append(f"    {json.dumps(name)}: [\n" + ",\n".join(listed) + "\n    ]")
        return "\n".join(["{", *lines, '  "tables": {', ",\n".join(tables), "  }", "}", ""])


class TilesError(ValueError):
    """A file that is not as it has to be."""


def choose(table: str, **sizes: int) -> Mapping[str, int]:
    """What the first row of a table that fits these sizes says.

    Raises ValueError where no row does.
    """
    return _chosen(_current(), table, tuple(sizes.items()))


def token_counts() -> list[int]:
    """Return the numbers of tokens at which some table changes its choice, ascending: the last of
    each row and the first of the next."""
    bounds = {
        row.up_to["tokens"]
        for rows in _current().tables.values()
        for row in rows
        if "tokens" in row.up_to
    }
    return sorted(bounds | {bound + 1 for bound in bounds})


def row_for(table: str, sizes: Mapping[str, int]) -> Row:
    """The row of default.json that these sizes belong to. Raises ValueError where there is none."""
    return _fitting(read(DEFAULT).tables, table, sizes)


@contextmanager
def using(tables: Tables, onto: Tables | None = None) -> Iterator[None]:
    """Replace rows of the tables, those with the same `up_to`, within this process; onto: all
    tables, in place of those that are there."""
    before = _replaced[:]
    _replaced[:] = [_Chosen(_merged(_current().tables if onto is None else onto, tables))]
    try:
        yield
    finally:
        _replaced[:] = before


def tables_for(device: str, architecture: int) -> Tables:
    """All tables for a GPU by its name and architecture, as 90 for sm_90."""
    default = read(DEFAULT)
    others = [read(path.stem) for path in sorted(FOLDER.glob("*.json")) if path.stem != DEFAULT]
    alike = [one for one in others if one.architecture == architecture]
    named = [one for one in alike if one.device == device]
    found = (named or alike)[:1]
    return _merged(default.tables, found[0].tables) if found else default.tables


def file_name(device: str) -> str:
    """`nvidia-h200` for NVIDIA H200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


@cache
def read(name: str) -> File:
    """A file of FOLDER by its name without `.json`. Raises TilesError."""
    path = FOLDER / f"{name}.json"
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise TilesError(f"{path} is no JSON: {error}") from error
    return parse(str(path), content, None if name == DEFAULT else read(DEFAULT).tables)


def parse(path: str, content: Any, known: Tables | None) -> File:
    """The content of a file, checked; known: the default's tables, of which it has to have rows.

    Raises TilesError, which names the field.
    """
    if not isinstance(content, dict):
        raise TilesError(f"{path} is no object")
    wanted = {**ABOUT, "versions": dict, "tables": dict}
    for name, kind in wanted.items():
        if type(content.get(name)) is not kind:
            raise TilesError(f"{path}: {name} is {content.get(name)!r:.60}, but a {kind.__name__}")
    unknown = sorted({*content} - {*wanted})
    if unknown:
        raise TilesError(f"{path}: nothing is known of {', '.join(unknown)}")
    strange = sorted({*content["tables"]} - {*(content["tables"] if known is None else known)})
    if strange:
        raise TilesError(f"{path}: tables.{strange[0]} is of no kernel")
    tables = {
        name: _rows(f"{path}: tables.{name}", rows, None if known is None else known[name])
        for name, rows in content["tables"].items()
    }
    return File(**{**content, "tables": tables})


def _rows(where: str, rows: Any, known: Sequence[Row] | None) -> list[Row]:
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise TilesError(f"{where} is no list of objects")
    return [_row(f"{where}[{place}]", row, known) for place, row in enumerate(rows)]


def _row(where: str, row: dict[str, Any], known: Sequence[Row] | None) -> Row:
    """One row; the default has one with the same up_to and the same choices."""
    up_to = row.get("up_to")
    if not isinstance(up_to, dict) or not all(type(most) is int for most in up_to.values()):
        raise TilesError(f"{where}.up_to is {up_to!r:.60}, but an object of integers")
    use = {name: value for name, value in row.items() if name != "up_to"}
    for name, value in use.items():
        if name not in LIMITS:
            raise TilesError(f"{where}.{name} is no choice: {', '.join(LIMITS)} are")
        least, most = LIMITS[name]
        power = name == "stages" or (type(value) is int and value & (value - 1) == 0)
        if type(value) is not int or not least <= value <= most or not power:
            kind = "an integer" if name == "stages" else "a power of two"
            raise TilesError(f"{where}.{name} is {value!r}, but {kind} from {least} to {most}")
    if known is not None:
        same = next((one for one in known if one.up_to == up_to), None)
        if same is None:
            raise TilesError(f"{where}.up_to is {up_to!r}, but {DEFAULT}.json has no such row")
        if {*same.use} != {*use}:
            wanted = ", ".join(same.use)
            raise TilesError(f"{where} says {', '.join(use)}, but it has to say {wanted}")
    return Row(up_to, use)


def _merged(tables: Tables, others: Tables) -> Tables:
    """Tables with rows of others in place of those with the same up_to."""
    instead = {name: {_key(row): row for row in rows} for name, rows in others.items()}
    return {
        name: [instead.get(name, {}).get(_key(row), row) for row in rows]
        for name, rows in tables.items()
    }


def _key(row: Row) -> Sizes:
    return tuple(sorted(row.up_to.items()))


def _fitting(tables: Tables, table: str, sizes: Mapping[str, int]) -> Row:
    for row in tables[table]:
        if row.fits(sizes):
            return row
    named = ", ".join(f"{name} {size}" for name, size in sizes.items())
    raise ValueError(f"no tiles for {table} of {named}: kernels are not made for it")


class _Chosen:
    """Tables, compared by identity, so that what was chosen can be remembered."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables


@cache
def _chosen(chosen: _Chosen, table: str, sizes: Sizes) -> Mapping[str, int]:
    return _fitting(chosen.tables, table, dict(sizes)).use


_replaced: list[_Chosen] = []
"""What `using` put in place of the GPU's."""


def _current() -> _Chosen:
    return _replaced[0] if _replaced else _own()


@cache
def _own() -> _Chosen:
    """The tables for the GPU of this process."""
    if not torch.cuda.is_available():
        return _Chosen(read(DEFAULT).tables)
    major, minor = torch.cuda.get_device_capability()
    return _Chosen(tables_for(torch.cuda.get_device_name(), 10 * major + minor))
