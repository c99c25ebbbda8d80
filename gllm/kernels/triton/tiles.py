"""Tables of tile sizes, warps and stages of kernel launches, read from tuned/*.json.

`tuned/default.json` has all tables and rows. The file of a GPU, found by the name of the device or
else by its architecture, replaces some rows; `python -m gllm.kernels.tune` writes it
(gllm/kernels/tune.py).

The rows of a table are ordered. A row applies to problem sizes up to its `up_to`; the first
matching row is used.
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
"""Smallest and largest value of each launch parameter; all but stages are powers of two."""
ABOUT = {"device": str, "architecture": int, "timed": bool, "how": str, "date": str}
"""Metadata fields of a file and their types; architecture 0 stands for all."""

Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class TileRow:
    """Launch parameters (tile sizes, warps, stages) of a kernel for a range of problem sizes.

    One row of a table in tuned/*.json.
    """

    up_to: Mapping[str, int]
    """Largest supported value per problem size; sizes that are not named are not limited."""
    use: Mapping[str, int]
    """Launch parameters by names of LIMITS."""

    def fits(self, sizes: Mapping[str, int]) -> bool:
        """Return True if the row applies to these problem sizes."""
        return all(sizes[name] <= most for name, most in self.up_to.items())


Tables = Mapping[str, Sequence[TileRow]]


@dataclass(frozen=True)
class TileFile:
    """Content of a file of tuned kernel launch parameters, for one GPU or the defaults for all."""

    device: str
    """Name of the GPU."""
    architecture: int
    """GPU architecture, for example 90 for sm_90; 0: all."""
    timed: bool
    """True if the values were measured on the GPU."""
    how: str
    """The command that wrote the file, or how the values were chosen."""
    date: str
    versions: Mapping[str, str]
    """Versions of packages that the values depend on, such as triton."""
    tables: Tables
    """Rows of launch parameters by table name."""

    def to_json(self) -> str:
        """Return the content as JSON text, with one line per table row."""
        about = {name: getattr(self, name) for name in (*ABOUT, "versions")}
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in about.items()]
        tables = []
        for name, rows in self.tables.items():
            listed = [f"      {json.dumps({'up_to': row.up_to, **row.use})}" for row in rows]
            tables.append(f"    {json.dumps(name)}: [\n" + ",\n".join(listed) + "\n    ]")
        return "\n".join(["{", *lines, '  "tables": {', ",\n".join(tables), "  }", "}", ""])


class TilesError(ValueError):
    """Raised if a file of tile sizes or a tuning journal is invalid."""


def choose_tiles(table: str, **sizes: int) -> Mapping[str, int]:
    """Return a kernel's launch parameters for the given problem sizes, from the active tables.

    Args:
        table: name of the table, for example "linear_fp8".
        sizes: problem sizes, for example tokens=32; the first row that applies to them is used.

    Raises:
        ValueError: No row applies.
    """
    return _chosen(_current(), table, tuple(sizes.items()))


def list_token_boundaries() -> list[int]:
    """List the numbers of tokens at which launch parameters of any kernel change, ascending.

    Contains the last number of tokens of each row and the first of the next row.
    """
    bounds = {
        row.up_to["tokens"]
        for rows in _current().tables.values()
        for row in rows
        if "tokens" in row.up_to
    }
    return sorted(bounds | {bound + 1 for bound in bounds})


def find_default_row(table: str, sizes: Mapping[str, int]) -> TileRow:
    """Return the row of launch parameters in default.json that applies to the problem sizes.

    Raises:
        ValueError: No row applies.
    """
    return _fitting(read_tile_file(DEFAULT).tables, table, sizes)


@contextmanager
def override_tiles(tables: Tables, onto: Tables | None = None) -> Iterator[None]:
    """Replace launch parameters in the active tables of this process within a `with` block.

    Args:
        tables: rows that replace those with the same `up_to`.
        onto: tables to start from, instead of the active ones.
    """
    before = _replaced[:]
    _replaced[:] = [_ActiveTables(_merged(_current().tables if onto is None else onto, tables))]
    try:
        yield
    finally:
        _replaced[:] = before


def load_tables(device: str, architecture: int, folder: Path = FOLDER) -> Tables:
    """Load the launch parameters of all kernels for a GPU: default.json and the GPU's own file.

    Args:
        device: name of the GPU.
        architecture: for example 90 for sm_90; used if there is no file for the name.
        folder: folder of the files.
    """
    default = read_tile_file(DEFAULT, folder)
    others = [
        read_tile_file(path.stem, folder)
        for path in sorted(folder.glob("*.json"))
        if path.stem != DEFAULT
    ]
    same_architecture = [file for file in others if file.architecture == architecture]
    same_device = [file for file in same_architecture if file.device == device]
    files = same_device or same_architecture
    return _merged(default.tables, files[0].tables) if files else default.tables


def tile_file_name(device: str) -> str:
    """Return the file name, without suffix, of a GPU's launch parameters, such as `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


@cache
def read_tile_file(name: str, folder: Path = FOLDER) -> TileFile:
    """Read a file of kernel launch parameters, by its name without `.json`.

    Raises:
        TilesError: The file is invalid.
        OSError: The file cannot be read.
    """
    path = folder / f"{name}.json"
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise TilesError(f"{path} is no JSON: {error}") from error
    return parse_tile_file(
        str(path), content, None if name == DEFAULT else read_tile_file(DEFAULT, folder).tables
    )


def parse_tile_file(path: str, content: Any, known: Tables | None) -> TileFile:
    """Parse and check the JSON content of a file of kernel launch parameters.

    Args:
        path: Name of the file for messages.
        content: Parsed JSON.
        known: Tables of default.json, whose rows the file may replace; None for default.json.

    Raises:
        TilesError: The content is invalid; the message names the field.
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
    return TileFile(**{**content, "tables": tables})


def _rows(where: str, rows: Any, known: Sequence[TileRow] | None) -> list[TileRow]:
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise TilesError(f"{where} is no list of objects")
    return [_row(f"{where}[{place}]", row, known) for place, row in enumerate(rows)]


def _row(where: str, row: dict[str, Any], known: Sequence[TileRow] | None) -> TileRow:
    """Parse a row. default.json must have a row with the same up_to and parameters."""
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
    return TileRow(up_to, use)


def _merged(tables: Tables, others: Tables) -> Tables:
    """Return tables in which rows of others replace those with the same up_to."""
    instead = {name: {_key(row): row for row in rows} for name, rows in others.items()}
    return {
        name: [instead.get(name, {}).get(_key(row), row) for row in rows]
        for name, rows in tables.items()
    }


def _key(row: TileRow) -> Sizes:
    return tuple(sorted(row.up_to.items()))


def _fitting(tables: Tables, table: str, sizes: Mapping[str, int]) -> TileRow:
    for row in tables[table]:
        if row.fits(sizes):
            return row
    named = ", ".join(f"{name} {size}" for name, size in sizes.items())
    raise ValueError(f"no tiles for {table} of {named}: kernels are not made for it")


class _ActiveTables:
    """Tables, hashed by identity, so that lookups can be cached."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables


@cache
def _chosen(chosen: _ActiveTables, table: str, sizes: Sizes) -> Mapping[str, int]:
    return _fitting(chosen.tables, table, dict(sizes)).use


_replaced: list[_ActiveTables] = []
"""Tables set by `override_tiles`, instead of those of the GPU."""


def _current() -> _ActiveTables:
    return _replaced[0] if _replaced else _own()


@cache
def _own() -> _ActiveTables:
    """Return the tables for the GPU of this process."""
    if not torch.cuda.is_available():
        return _ActiveTables(read_tile_file(DEFAULT).tables)
    major, minor = torch.cuda.get_device_capability()
    return _ActiveTables(load_tables(torch.cuda.get_device_name(), 10 * major + minor))
