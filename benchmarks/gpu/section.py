"""Process that measures the rows of one section: `python -m benchmarks.gpu.section TASK`.

After an illegal operation a GPU is unusable for its process. The process then exits, and a new one
continues with the next row.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.rows import SKIPPED, Log, PendingRow, Row, run_row
from benchmarks.gpu.stand_ins import provide_msgspec

if TYPE_CHECKING:
    from benchmarks.gpu.place import Place

SECTIONS = ("ceilings", "kernels", "Qwen2.5-7B", "Llama-3.1-8B", "stages")
DEAD = 3
"""Exit status of a process whose GPU is unusable."""


@dataclass
class Task:
    """Task of the process."""

    section: str
    log: str
    """Path of the file to which rows are logged."""
    is_dry: bool
    seconds: float
    """Seconds after which no new row starts."""
    done: list[str] = field(default_factory=list)
    """Rows that earlier processes have logged."""
    failed: list[str] = field(default_factory=list)
    """Rows of these that failed."""
    options: dict[str, str] = field(default_factory=dict)
    """Additional fields of EngineConfig."""


def main(task: Task) -> int:
    """Measure and log every row that is not done; return the exit status."""
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
    """Report the device as usable; the stages' workers own it."""


def rows_on(place: "Place", task: Task) -> Iterator[PendingRow]:
    """Return the rows of a section that computes in this process."""
    if task.section == "ceilings":
        from benchmarks.gpu import ceilings

        return ceilings.rows(place)
    if task.section == "kernels":
        from benchmarks.gpu import kernels, ranks

        # Collectives last: where they hang, the process ends with them.
        return chain(kernels.rows(place), ranks.rows(place))
    from benchmarks.gpu import engine

    # If recording graphs made the device unusable, the other rows run without graphs.
    graphs = engine.READY not in task.failed
    folder = Path(task.log).with_suffix("")
    return engine.rows(place, task.section, folder, task.options, graphs)


if __name__ == "__main__":
    status = main(Task(**json.loads(sys.argv[1])))
    sys.stdout.flush()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    # Exit at once: objects of an unusable device cannot be destroyed.
    os._exit(status)
