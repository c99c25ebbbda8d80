"""Tables of operator profiles: Vidur's, which ship with gllm, or a folder of `gllm profile`."""

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from gllm.sim.data_tables import TableRow, read_table

VIDUR_FILES: Mapping[str, str] = MappingProxyType(
    {
        "token_ops": "vidur_token_ops.csv.gz",
        "attention": "vidur_attention_a100_llama2-70b_tp2.csv.gz",
        "collectives": "vidur_collectives.csv.gz",
        "cpu_overheads": "vidur_cpu_overheads.csv.gz",
        "model_shapes": "vidur_model_shapes.csv",
    }
)
"""Shipped file of each table."""


class OperatorTables:
    """Measurements of one origin, in the columns of gllm/sim/data/README.md.

    A folder has a file NAME.csv for each NAME of VIDUR_FILES.

    Args:
        folder: Folder that `gllm profile --operators` has written; None for Vidur's.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._tables: dict[str, list[TableRow]] = {}

    @property
    def is_vidur(self) -> bool:
        """True for the tables that ship with gllm."""
        return self._folder is None

    def file_name(self, name: str) -> str:
        """Return the file of a table, for messages."""
        return VIDUR_FILES[name] if self._folder is None else str(self._folder / f"{name}.csv")

    def read(self, name: str) -> list[TableRow]:
        """Return the rows of a table.

        Raises:
            ValueError: The folder lacks the table.
        """
        if self._folder is None:
            return read_table(VIDUR_FILES[name])
        if name not in self._tables:
            self._tables[name] = self._read_file(name)
        return self._tables[name]

    def _read_file(self, name: str) -> list[TableRow]:
        try:
            with open(self.file_name(name), encoding="utf-8", newline="") as file:
                return list(csv.DictReader(file))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{self._folder} is no folder of `gllm profile --operators`: {error}"
            ) from None


VIDUR_TABLES = OperatorTables()


@cache
def read_folder(folder: Path) -> OperatorTables:
    """Return the tables of a folder, the same object at every call."""
    return OperatorTables(folder)
