"""Rows of the benchmark: run one, catch its errors, log its result."""

import json
import math
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
NOT_FINITE = -1.0
"""Replaces a non-finite figure; its row has failed."""
MESSAGE_LENGTH = 500
"""Characters of an error in a row's note; the traceback has the full text."""


class SkipRowError(Exception):
    """A row cannot be measured here; the message says why."""


@dataclass
class Measured:
    """Figures of a measured row."""

    figures: dict[str, float]
    """Values by the names of report.FIGURES."""
    aims: dict[str, float] = field(default_factory=dict)
    """Minimum values of figures, including derived ones."""
    note: str = ""
    fault: str = ""
    """Reason why the result is wrong; empty if it is correct."""


class PendingRow(NamedTuple):
    """A row to be measured."""

    name: str
    work: Callable[[], Measured]
    is_rival: bool = False
    """The row measures another implementation: its errors are not failures."""


@dataclass
class Row:
    """A row of the results."""

    section: str
    name: str
    status: str
    """One of ok, failed (raised, or wrong) and skipped."""
    figures: dict[str, float] = field(default_factory=dict)
    aims: dict[str, float] = field(default_factory=dict)
    note: str = ""
    traceback: str = ""
    seconds: float = 0.0
    """Elapsed seconds, including compilation and references."""


def judged(figures: dict[str, float], aims: dict[str, float], note: str = "") -> Measured:
    """Return a row that fails if its `error` exceeds its `tolerance` or is NaN."""
    error, tolerance = figures["error"], figures["tolerance"]
    if error <= tolerance:
        return Measured(figures, aims, note)
    fault = f"error {error:.3g} is above the tolerance {tolerance:.3g}"
    return Measured(figures, aims, note, fault)


def run_row(section: str, named: PendingRow) -> Row:
    """Measure a row; an exception becomes part of the result."""
    begin = time.monotonic()
    try:
        measured = named.work()
    except SkipRowError as skip:
        row = Row(section, named.name, SKIPPED, note=str(skip))
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip()[:MESSAGE_LENGTH]
        status = SKIPPED if named.is_rival else FAILED
        row = Row(section, named.name, status, note=text, traceback=traceback.format_exc())
    else:
        # JSON has no notation for NaN and infinity.
        figures = {
            name: value if math.isfinite(value) else NOT_FINITE
            for name, value in measured.figures.items()
        }
        broken = ", ".join(
            name for name, value in measured.figures.items() if not math.isfinite(value)
        )
        faults = [measured.fault, broken and f"not finite: {broken}"]
        notes = "; ".join(part for part in (*faults, measured.note) if part)
        status = FAILED if any(faults) else OK
        row = Row(section, named.name, status, figures, measured.aims, notes)
    row.seconds = time.monotonic() - begin
    return row


class Log:
    """Log file of a section, with one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def environment(self, description: dict[str, Any]) -> None:
        """Log the section's environment."""
        self._write({"environment": description})

    def rows(self, names: Iterable[str]) -> None:
        """Log the names of all rows."""
        self._write({"rows": list(names)})

    def begin(self, named: PendingRow) -> None:
        """Log that a row starts."""
        self._write({"begin": named.name, "is_rival": named.is_rival})

    def end(self, row: Row) -> None:
        """Log the result of a row."""
        self._write({"row": asdict(row)})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


@dataclass
class SectionLog:
    """Contents of a section's log."""

    environment: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    open: str | None = None
    """Row that started and did not end: its process was stopped or died."""
    open_is_rival: bool = False


def read_log(path: Path) -> SectionLog:
    """Read what a section has logged so far, over all of its processes."""
    contents = SectionLog()
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut off when its process was stopped
        contents.environment = entry.get("environment", contents.environment)
        contents.names = entry.get("rows", contents.names)
        contents.open = entry.get("begin", contents.open)
        contents.open_is_rival = entry.get("is_rival", contents.open_is_rival)
        if "row" in entry:
            contents.rows.append(Row(**entry["row"]))
            contents.open = None
    return contents
