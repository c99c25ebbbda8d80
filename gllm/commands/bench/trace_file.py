"""Requests from a file: JSON lines, or CSV with a header.

Owns the names of the columns. Knows nothing of what is done with the rows.
"""

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

SUFFIXES = (".jsonl", ".csv")


class Row(NamedTuple):
    """A request as it was written down."""

    prompt: int | str | list[int]
    """Its length, its text or its token ids."""
    output: int
    arrival: float | None = None


def read_rows(path: str) -> list[Row]:
    """The rows of a file: `prompt` (text, or in JSON a list of ids) or `prompt_tokens`;
    `output_tokens`; `arrival_s`, optional, in seconds.

    Raises ValueError that names the line and what is wrong with it, OSError as open does.
    """
    with Path(path).open(encoding="utf-8", newline="") as lines:
        rows: Iterable[Any] = csv.DictReader(lines) if path.endswith(".csv") else _objects(lines)
        read = []
        try:
            for row in rows:
                read.append(_row(row))
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path}, request {len(read) + 1}: {error!r}: each takes prompt or prompt_tokens, "
                "output_tokens, and for a replay arrival_s"
            ) from None
    if not read:
        raise ValueError(f"{path} has no requests")
    return read


def _objects(lines: Iterable[str]) -> Iterable[Any]:
    return (json.loads(line) for line in lines if line.strip())


def _row(row: Any) -> Row:
    if not isinstance(row, dict):
        raise ValueError("not an object")
    prompt = row["prompt"] if row.get("prompt") else int(row["prompt_tokens"])
    if not isinstance(prompt, int | str | list):
        raise ValueError("a prompt that is neither text nor ids")
    output = int(row["output_tokens"])
    arrival = row.get("arrival_s")
    if output < 1 or (isinstance(prompt, int) and prompt < 1):
        raise ValueError("a length below 1")
    return Row(prompt, output, None if arrival in (None, "") else float(arrival))
