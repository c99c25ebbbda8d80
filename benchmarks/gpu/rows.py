"""Rows of the benchmark: what one measured, whether it holds, and why there is none.

Owns a row's life: run, caught, written down. Knows nothing of what is measured.
"""

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
"""Stands for a figure that is no number; its row has failed."""
MESSAGE_LENGTH = 500
"""Characters of an error that a row's note keeps; all of it is in its traceback."""


class Skip(Exception):
    """A row cannot be measured here; says why."""


@dataclass
class Measured:
    """What a row brought."""

    figures: dict[str, float]
    """By names of report.FIGURES."""
    aims: dict[str, float] = field(default_factory=dict)
    """What figures, derived ones too, should be at least."""
    note: str = ""
    fault: str = ""
    """Why it is wrong although it ran; empty where it is right."""


class Named(NamedTuple):
    """A row before it is measured."""

    name: str
    work: Callable[[], Measured]
    is_rival: bool = False
    """Of somebody else's: what goes wrong with it is no failure."""


@dataclass
class Row:
    """A row of the results."""

    section: str
    name: str
    status: str
    """ok, failed (raised, or wrong) or skipped."""
    figures: dict[str, float] = field(default_factory=dict)
    aims: dict[str, float] = field(default_factory=dict)
    note: str = ""
    traceback: str = ""
    seconds: float = 0.0
    """That it took, compilation and references included."""


def judged(figures: dict[str, float], aims: dict[str, float], note: str = "") -> Measured:
    """A row with an `error` that has to be within its `tolerance`; a NaN is not."""
    error, tolerance = figures["error"], figures["tolerance"]
    if error <= tolerance:
        return Measured(figures, aims, note)
    fault = f"error {error:.3g} is above the tolerance {tolerance:.3g}"
    return Measured(figures, aims, note, fault)


def run_row(section: str, named: Named) -> Row:
    """Measure a row; whatever it raises becomes a part of it."""
    begin = time.monotonic()
    try:
        found = named.work()
    except Skip as skip:
        row = Row(section, named.name, SKIPPED, note=str(skip))
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip()[:MESSAGE_LENGTH]
        status = SKIPPED if named.is_rival else FAILED
        row = Row(section, named.name, status, note=text, traceback=traceback.format_exc())
    else:
        # JSON has no word for them.
        figures = {
            name: one if math.isfinite(one) else NOT_FINITE for name, one in found.figures.items()
        }
        broken = ", ".join(name for name, one in found.figures.items() if not math.isfinite(one))
        faults = [found.fault, broken and f"not finite: {broken}"]
        notes = "; ".join(part for part in (*faults, found.note) if part)
        status = FAILED if any(faults) else OK
        row = Row(section, named.name, status, figures, found.aims, notes)
    row.seconds = time.monotonic() - begin
    return row


class Log:
    """The file in which a section tells what it does, a JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def environment(self, found: dict[str, Any]) -> None:
        """Say what the section runs on."""
        self._write({"environment": found})

    def rows(self, names: Iterable[str]) -> None:
        """Say which rows there are."""
        self._write({"rows": list(names)})

    def begin(self, named: Named) -> None:
        """Say which row comes now."""
        self._write({"begin": named.name, "is_rival": named.is_rival})

    def end(self, row: Row) -> None:
        """Say what it brought."""
        self._write({"row": asdict(row)})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


@dataclass
class Told:
    """What a section's log says."""

    environment: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    open: str | None = None
    """A row that began and did not end: its process was stopped or died."""
    open_is_rival: bool = False


def read_log(path: Path) -> Told:
    """What a section told so far, over all of its processes."""
    told = Told()
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in lines:
        try:
            said = json.loads(line)
        except ValueError:
            continue  # cut off when its process was stopped
        told.environment = said.get("environment", told.environment)
        told.names = said.get("rows", told.names)
        told.open = said.get("begin", told.open)
        told.open_is_rival = said.get("is_rival", told.open_is_rival)
        if "row" in said:
            told.rows.append(Row(**said["row"]))
            told.open = None
    return told
