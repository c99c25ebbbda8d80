"""Verify and measure gllm on a GPU, on a bare machine, in eight minutes.

Run: `python -m benchmarks.gpu.run`. Each section runs in its own process: if one dies or hangs, its
current row has failed and the next one continues. This module needs no torch;
docs/benchmarks/gpu.md lists the requirements of the rows.

The exit status is 1 if a row failed, a key of the results is missing, or no row was measured. A
missed target is reported and is no failure.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if not __package__:
    # Run as a file: sys.path has this folder instead of the checkout.
    sys.path[0] = str(ROOT)

from benchmarks.gpu import report  # noqa: E402
from benchmarks.gpu.rows import FAILED, SKIPPED, Row, SectionLog, read_log  # noqa: E402
from benchmarks.gpu.section import SECTIONS, Task  # noqa: E402

SHARES = dict(zip(SECTIONS, (0.06, 0.3, 0.27, 0.22, 0.15), strict=True))
"""Shares of the time budget; the next sections receive the unused time of a section."""
GRACE = 15.0
"""Seconds that a row may run beyond its section's time before its process is stopped."""
ATTEMPTS = 12
"""Maximum number of processes per section."""
TIME_UP = "stopped: the section's time was up"
MIN_SECONDS = 5.0
"""Minimum remaining seconds to start another process."""


@dataclasses.dataclass(frozen=True)
class SectionProcess:
    """Command of a section's process, and its time limits."""

    command: tuple[str, ...] = ("-m", "benchmarks.gpu.section")
    """Arguments of Python; the task follows as JSON."""
    start_seconds: float = 60.0
    """Maximum seconds of a process until its first row."""
    row_seconds: float = 90.0
    """Maximum seconds per row, including compilation and the creation of a model."""

    def watch(self, process: "subprocess.Popen[str]", log: Path, stop: float) -> str:
        """Wait until a process exits, `stop` has passed, or its log has not grown for too long.

        Returns:
            The cause of an abnormal end, else an empty string.
        """
        size, grown, limit = _size(log), time.monotonic(), self.start_seconds
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(0.2)
                return f"its process ended with {code}" if code else ""
            now = time.monotonic()
            if _size(log) != size:
                size, grown, limit = _size(log), now, self.row_seconds
            if now > stop:
                return TIME_UP
            if now - grown > limit:
                return f"stopped after {limit:.0f} s in which no row ended: it hangs"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.run", description=__doc__)
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on the CPU: no GPU needed"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="file for the JSON")
    parser.add_argument("--page", type=Path, help="Markdown page for the table")
    known = ", ".join(SECTIONS)
    parser.add_argument("--only", default="", help=f"sections, comma-separated: {known}; or engine")
    parser.add_argument("--time-budget", type=float, default=480.0, help="total seconds")
    engine = "another field of the engine's configuration, may be repeated"
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE", help=engine)
    return parser


def sections_of(only: str) -> list[str]:
    """Return the requested sections and the ceilings, which the others are compared with.

    Raises:
        ValueError: A section is unknown.
    """
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {each.lower(): [each] for each in SECTIONS}
    known["engine"] = [each for each in SECTIONS if each not in ("ceilings", "kernels", "stages")]
    unknown = [name for name in names if name.lower() not in known]
    if unknown:
        raise ValueError(f"--only {unknown[0]}: sections are {', '.join(known)}")
    asked = {each for name in names for each in known[name.lower()]} | {"ceilings"}
    return [each for each in SECTIONS if each in asked or not names]


def options_of(arguments: Sequence[str]) -> dict[str, str]:
    """Parse fields of the engine's configuration from NAME=VALUE.

    Raises:
        ValueError: An argument has no equals sign.
    """
    pairs = [each.partition("=") for each in arguments]
    wrong = [name for name, equals, _ in pairs if not equals]
    if wrong:
        raise ValueError(f"--engine {wrong[0]} must be NAME=VALUE")
    return {name.replace("-", "_"): value for name, _, value in pairs}


def run_section(task: Task, stop: float, section: SectionProcess = SectionProcess()) -> SectionLog:
    """Measure all rows of a section, in as many processes as necessary.

    Args:
        task: The section; updated.
        stop: Value of time.monotonic() at which the last process is stopped.
        section: Its process.
    """
    log = Path(task.log)
    for _ in range(ATTEMPTS):
        print(f"{task.section} ...", file=sys.stderr, flush=True)
        begin = time.monotonic()
        cause = run_process(task, stop, section)
        task.seconds -= time.monotonic() - begin
        section_log = read_log(log)
        if section_log.open is not None:
            # Written to the log, so that the next process's rows follow it.
            excused = section_log.open_is_rival or cause.startswith(TIME_UP)
            status = SKIPPED if excused else FAILED
            _append(log, Row(task.section, section_log.open, status, note=cause))
            section_log = read_log(log)
        task.done = [row.name for row in section_log.rows]
        task.failed = [row.name for row in section_log.rows if row.status == FAILED]
        rest = [name for name in section_log.names if name not in task.done]
        if not section_log.names:
            _append(log, Row(task.section, "start", FAILED, note=cause or "no rows"))
            return read_log(log)
        if not rest:
            return section_log
        if task.seconds < MIN_SECONDS or time.monotonic() + MIN_SECONDS > stop:
            break
    for name in rest:
        _append(log, Row(task.section, name, SKIPPED, note="past the section's time"))
    return read_log(log)


def run_process(task: Task, stop: float, section: SectionProcess) -> str:
    """Run a process on the section; return the cause of an abnormal end, else an empty string."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.getenv("PYTHONPATH"))))
    command = [sys.executable, *section.command, json.dumps(dataclasses.asdict(task))]
    with tempfile.TemporaryFile("w+") as errors:
        # A new process group, so that its workers are killed with it.
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=errors,
            stderr=errors,
            process_group=0,
            text=True,
        )
        try:
            cause = section.watch(
                process, Path(task.log), min(time.monotonic() + task.seconds + GRACE, stop)
            )
        finally:
            end_group(process)
        errors.seek(0)
        last = errors.read()[-1500:].strip()
    if cause and last:
        print(last, file=sys.stderr)
        cause += f": {last.splitlines()[-1][:300]}"
    return cause


def _size(log: Path) -> int:
    return log.stat().st_size if log.is_file() else 0


def end_group(process: "subprocess.Popen[str]") -> None:
    """Kill a process and its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _append(log: Path, row: Row) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({"row": dataclasses.asdict(row)}) + "\n")


def measure(options: argparse.Namespace, process: SectionProcess) -> dict[str, Any]:
    """Run all sections and return the results, which are also written to the file."""
    begin = time.monotonic()
    sections, budget = sections_of(options.only), options.time_budget
    whole = sum(SHARES[each] for each in sections)
    rows: list[Row] = []
    environment: dict[str, Any] = {}
    results: dict[str, Any] = {}
    shares = 0.0
    with tempfile.TemporaryDirectory(prefix="gllm-gpu-") as folder:
        for index, section in enumerate(sections):
            shares += SHARES[section] / whole
            # Reserve the grace period, so that the last row can finish.
            seconds = begin + shares * (budget - GRACE) - time.monotonic()
            log = str(Path(folder, f"{index}.log"))
            engine = options_of(options.engine)
            task = Task(section, log, options.dry_run, max(seconds, 0.0), options=engine)
            section_log = run_section(task, begin + budget, process)
            rows += section_log.rows
            environment = environment or section_log.environment
            run = {
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "command": shlex.join(["python", "-m", "benchmarks.gpu.run", *sys.argv[1:]]),
                "dry_run": options.dry_run,
                "budget_seconds": budget,
                "seconds": time.monotonic() - begin,
            }
            results = report.results_of(rows, environment, run)
            # After each section, so that an interrupted run keeps its results.
            report.write_json(options.out, results)
    return results


def main(arguments: Sequence[str] | None = None, process: SectionProcess = SectionProcess()) -> int:
    """Measure, write and print the results; return the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        sections_of(options.only)
        options_of(options.engine)
    except ValueError as error:
        parser.error(str(error))
    results = measure(options, process)
    if options.page is not None:
        report.write_page(options.page, results)
    print(report.head(results), report.table(results), sep="\n\n")
    wrong = report.complaints(results)
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong or results["summary"][FAILED] or not results["summary"]["ok"] else 0


if __name__ == "__main__":
    # An exception, so that the section's process is killed too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
