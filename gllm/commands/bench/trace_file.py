"""Read requests from a file: JSON lines, or CSV with a header."""

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from gllm.sim.workloads.sessions import PromptPart

SUFFIXES = (".jsonl", ".csv")


class TraceRow(NamedTuple):
    """Request of a trace file."""

    prompt: int | str | list[int] | tuple[PromptPart, ...]
    """Number of tokens, text, token ids, or parts that other prompts share."""
    output: int
    """Number of output tokens."""
    arrival: float | None = None
    """Seconds since the start of the trace."""
    session: str = ""
    """Conversation of the request; empty for none."""


def read_rows(path: str) -> list[TraceRow]:
    """Read the rows of a file.

    Columns: `prompt` (text, or in JSON a list of ids) or `prompt_tokens`; `output_tokens`;
    `arrival_s` in seconds and `session`, optional.

    Raises:
        ValueError: A row is invalid; the message names its number and the problem.
        OSError: The file cannot be read.
    """
    with Path(path).open(encoding="utf-8", newline="") as lines:
        rows: Iterable[Any] = csv.DictReader(lines) if path.endswith(".csv") else _objects(lines)
        read = []
        try:
            for row in rows:
                read.append(_row(row))
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path}, request {len(read) + 1}: {error!r}: a row needs prompt or prompt_tokens, "
                "output_tokens, and for a replay arrival_s"
            ) from None
    if not read:
        raise ValueError(f"{path} has no requests")
    return read


def _objects(lines: Iterable[str]) -> Iterable[Any]:
    return (json.loads(line) for line in lines if line.strip())


def _row(row: Any) -> TraceRow:
    if not isinstance(row, dict):
        raise ValueError("not an object")
    prompt = row["prompt"] if row.get("prompt") else int(row["prompt_tokens"])
    if not isinstance(prompt, int | str | list):
        raise ValueError("prompt is neither text nor a list of ids")
    output = int(row["output_tokens"])
    arrival = row.get("arrival_s")
    if output < 1 or (isinstance(prompt, int) and prompt < 1):
        raise ValueError("a length below 1")
    session = str(row.get("session") or "")
    return TraceRow(prompt, output, None if arrival in (None, "") else float(arrival), session)
