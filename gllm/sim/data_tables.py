"""Tables that ship with the simulator, in gllm/sim/data."""

import csv
import gzip
import io
from collections.abc import Mapping
from importlib.resources import files

TableRow = Mapping[str, str]


def read_table(name: str) -> list[TableRow]:
    """Return the rows of a shipped CSV table; a name ending in `.gz` is compressed with gzip."""
    data = (files("gllm.sim") / "data" / name).read_bytes()
    text = gzip.decompress(data) if name.endswith(".gz") else data
    return list(csv.DictReader(io.StringIO(text.decode())))
