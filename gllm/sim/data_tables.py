"""Tables that ship with the simulator, in gllm/sim/data."""

import csv
import gzip
import io
from collections.abc import Mapping
from importlib.resources import files

TableRow = Mapping[str, str]


def read_table(name: str) -> list[TableRow]:
    """Return the rows of a CSV table that ships with gllm, as dicts by column name.

    Args:
        name: File name in gllm/sim/data; files ending in `.gz` are decompressed.
    """
    data = (files("gllm.sim") / "data" / name).read_bytes()
    text = gzip.decompress(data) if name.endswith(".gz") else data
    return list(csv.DictReader(io.StringIO(text.decode())))
