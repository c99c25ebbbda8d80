"""One section's rows, in a process of its own: `python -m benchmarks.gpu.section TASK`.

Owns which rows a section has, and the process's end: a GPU that has done something illegal can do
nothing more for this process, so it ends, and another one goes on with the next row.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.rows import SKIPPED, Log, Named, Row, run_row
from benchmarks.gpu.stand_ins import provide_msgspec

if TYPE_CHECKING:
    from benchmarks.gpu.place import Place

SECTIONS = ("ceilings", "kernels", "Qwen2.5-7B", "Llama-3.1-8B", "stages")
DEAD = 3
"""The status of a process whose GPU cannot go on."""


@dataclass
class Task:
    """What the process is to do."""

    section: str
    log: str
    """File that rows are told in."""
    is_dry: bool
    seconds: float
    """After which no row begins."""
    done: list[str] = field(default_factory=list)
    """Rows that processes before this one have told of."""
    failed: list[str] = field(default_factory=list)
    """Of these, the ones that failed."""
    options: dict[str, str] = field(default_factory=dict)
    """More fields of EngineConfig."""


def main(task: Task) -> int:
    """Tell of every row that is not done; the exit status."""
    begin = time.monotonic()
    log = Log(Path(task.log))
    if task.section == "stages":
        from benchmarks.gpu import stages

        # This process needs no torch and leaves the device to its workers.
        named, healthy = stages.rows(task.is_dry, task.options), _always
    else:
        provide_msgspec()
        from benchmarks.gpu.place import Place

        place = Place(task.is_dry)
        log.environment(place.environment())
        named, healthy = rows_on(place, task), place.synchronize
    todo = list(named)
    log.rows(each.name for each in todo)
    for each in todo:
        if each.name in task.done:
            continue
        if time.monotonic() - begin > task.seconds:
            log.end(Row(task.section, each.name, SKIPPED, note="past the section's time"))
            continue
        log.begin(each)
        row = run_row(task.section, each)
        log.end(row)
        try:
            healthy()
        except Exception as error:
            print(f"{task.section}: the device cannot go on: {error}", file=sys.stderr)
            return DEAD
    return 0


def _always() -> None:
    """The stages' device is their workers'."""


def rows_on(place: "Place", task: Task) -> Iterator[Named]:
    """The rows of a section that computes in this process."""
    if task.section == "ceilings":
        from benchmarks.gpu import ceilings

        return ceilings.rows(place)
    if task.section == "kernels":
        from benchmarks.gpu import kernels

        return kernels.rows(place)
    from benchmarks.gpu import engine

    # Where recording graphs has broken the device once, the other rows do without.
    graphs = engine.READY not in task.failed
    folder = Path(task.log).with_suffix("")
    return engine.rows(place, task.section, folder, task.options, graphs)


if __name__ == "__main__":
    status = main(Task(**json.loads(sys.argv[1])))
    sys.stdout.flush()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    # At once: what a dead device left behind cannot be taken down.
    os._exit(status)
