"""Tables of operator profiles: Vidur's, which ship with gllm, or a folder of `gllm profile`."""

import csv
import math
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
TEXT_COLUMNS = frozenset(
    {"device", "model", "node", "collective", "is_prefill", "use_gated_mlp", "post_attn_norm"}
)
"""Columns of names and truth values; all others have numbers, or nothing."""


class OperatorTables:
    """Tables of measured operator times: those that `gllm profile --operators` wrote, or Vidur's.

    A folder has a file NAME.csv for each NAME of VIDUR_FILES. gllm/sim/data/README.md describes the
    columns.

    Args:
        folder: Folder that `gllm profile --operators` has written; None for Vidur's tables, which
            are shipped with gllm.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._tables: dict[str, list[TableRow]] = {}

    @property
    def is_vidur(self) -> bool:
        """True for Vidur's tables, which ship with gllm."""
        return self._folder is None

    def file_name(self, name: str) -> str:
        """Return the name of the file of a table, for error messages."""
        return VIDUR_FILES[name] if self._folder is None else str(self._folder / f"{name}.csv")

    def read(self, name: str) -> list[TableRow]:
        """Return the rows of a table.

        Raises:
            ValueError: The folder lacks the table, or the file is damaged.
        """
        if self._folder is None:
            return read_table(VIDUR_FILES[name])
        if name not in self._tables:
            self._tables[name] = self._read_file(name)
        return self._tables[name]

    def _read_file(self, name: str) -> list[TableRow]:
        try:
            with open(self.file_name(name), encoding="utf-8", newline="") as file:
                rows: list[TableRow] = list(csv.DictReader(file))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{self._folder} is no folder of `gllm profile --operators`: {error}"
            ) from None
        for number, row in enumerate(rows, start=1):
            for column, text in row.items():
                if column is None or not _is_valid(column, text):
                    raise ValueError(
                        f"{self.file_name(name)}: row {number} has {text!r} as {column}: measure "
                        "it again with `gllm profile --operators`"
                    )
        return rows


def _is_valid(column: str, text: str | None) -> bool:
    """Return True for a cell that a column may have; None is one that the row lacks."""
    if not text or column in TEXT_COLUMNS:
        return text is not None
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


VIDUR_TABLES = OperatorTables()


@cache
def read_folder(folder: Path) -> OperatorTables:
    """Return the operator tables that `gllm profile --operators` wrote; cached by folder."""
    return OperatorTables(folder)
