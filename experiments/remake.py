"""Remake pages of experiments: `python -m experiments.remake [PAGE ...]`, or `make experiments`.

The command of a page is the one that the page names after "Made by". Pages that fail do not stop
the others; the exit status is 1 if one failed.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from experiments.parallel import count_cores
from gllm.options.flags import FlagParser, number_type

FOLDER = Path(__file__).parent / "pages"
MADE_BY = re.compile(
    r"^Made by `(?P<command>python -m experiments [^`]+)`"
    r"(?:.*?Run time: (?P<seconds>\d+) s .*?(?P<cpu>\d+) s of CPU time)?",
    re.MULTILINE,
)
MEASURES_SPEED = ("replay", "kv-theta", "prediction")
"""Experiments whose figures contain the speed of this machine."""
EMULATES = ("emulation", "pools", "two-machines", "two-nodes")
"""Experiments on emulated devices without a flag that says so."""
MAX_SECONDS = 2 * 3600.0
"""Longest time of a page: a run that hangs ends then."""
FINAL_COMMAND = ("python", "-m", "scripts.claims_page")
"""Writes the index of all claims, after the pages."""


class Lane(Enum):
    """Part of the machine that the command of a page needs, which decides what runs beside it."""

    ALONE = "alone"
    """The figures contain the speed of this machine: nothing runs beside it."""
    REAL_TIME = "real time"
    """Engines on emulated devices mostly sleep, but must not be late: one page at a time."""
    SIMULATION = "simulation"
    """Figures do not depend on time: in the time that emulated engines leave."""


@dataclass(frozen=True)
class PageCommand:
    """Command that makes a page, and the time that it took last."""

    page: Path
    words: tuple[str, ...]
    """`python -m experiments NAME` and flags."""
    seconds: float | None = None
    """Of the last run; None if the page does not say."""
    cpu_seconds: float | None = None
    """CPU time of all processes of the last run; None if the page does not say."""

    @property
    def lane(self) -> Lane:
        """Part of the machine that the command needs."""
        name = self.words[3]
        if "--emulated" in self.words or name in EMULATES:
            return Lane.REAL_TIME
        return Lane.ALONE if "--real" in self.words or name in MEASURES_SPEED else Lane.SIMULATION


@dataclass(frozen=True)
class Outcome:
    """End of a page's command."""

    command: PageCommand
    seconds: float
    status: int
    """Exit status; negative: the signal that ended it."""
    num_changed: int = 0
    """Lines of the page that differ from the ones before, without that of its run time."""
    log: str = ""
    """Output of a command that failed."""

    def __str__(self) -> str:
        head = f"{self.command.page.stem:26}{self.seconds:7.0f} s  "
        if self.status:
            last = self.log.strip().rpartition("\n")[2]
            return f"{head}FAILED (exit status {self.status}): {last}"
        same = "same figures" if not self.num_changed else f"{self.num_changed} lines changed"
        return f"{head}{same}"


def read_commands(folder: Path = FOLDER) -> list[PageCommand]:
    """Return the commands of all pages of a folder that name one, in the order of their names."""
    commands = []
    for page in sorted(folder.glob("*.md")):
        if made := MADE_BY.search(page.read_text(encoding="utf-8")):
            seconds, cpu = (float(made[key]) if made[key] else None for key in ("seconds", "cpu"))
            commands.append(PageCommand(page, tuple(shlex.split(made["command"])), seconds, cpu))
    return commands


def order_longest_first(commands: Iterable[PageCommand]) -> list[PageCommand]:
    """Return commands in the order of their last CPU times; those without one come first.

    The time that a simulation took depends on what else the machine did then, its CPU time hardly.
    """

    def key(command: PageCommand) -> float:
        return float("-inf") if command.cpu_seconds is None else -command.cpu_seconds

    return sorted(commands, key=key)


def estimate_seconds(commands: Iterable[PageCommand], jobs: int) -> float:
    """Return the time of a run of commands by their last run times.

    Emulated engines run in real time; simulations share the CPU time that they leave. A simulation
    uses one core.

    Args:
        commands: Pages; those without a last run time count as 0.
        jobs: Simulations at a time, one per core.
    """
    alone = real_time = cpu = longest = 0.0
    for command in commands:
        seconds, cpu_seconds = command.seconds or 0.0, command.cpu_seconds or 0.0
        if command.lane is Lane.ALONE:
            alone += seconds
            continue
        cpu += cpu_seconds
        if command.lane is Lane.REAL_TIME:
            real_time += seconds
        else:
            longest = max(longest, cpu_seconds)
    return alone + max(real_time, cpu / jobs, longest)


def count_changed_lines(before: str, after: str) -> int:
    """Return the number of lines of a page that are new, without the line of the run time."""
    known = {line for line in before.splitlines() if not line.startswith("Made by ")}
    lines = [line for line in after.splitlines() if not line.startswith("Made by ")]
    return sum(line not in known for line in lines)


class PageRunner:
    """Runs the commands of pages, each in a process group of its own.

    Args:
        jobs: Simulations at a time, each in one process.
        max_seconds: Longest time of one command.
        report: Receives each outcome when its command has ended.
    """

    def __init__(
        self,
        jobs: int,
        max_seconds: float = MAX_SECONDS,
        report: Callable[[Outcome], None] = lambda outcome: print(outcome, flush=True),
    ) -> None:
        self._jobs, self._max_seconds, self._report = jobs, max_seconds, report
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._lock, self._is_stopped = threading.Lock(), False

    def run_all(self, commands: Sequence[PageCommand]) -> list[Outcome]:
        """Run all commands; return their outcomes.

        Those that need the machine alone run first, one after another; then one on emulated devices
        at a time, and beside it as many simulations as there are jobs, at the lowest priority. A
        simulation of a page has parts that one core computes, so pages side by side use more of
        the machine than the processes of one page.
        """
        lanes = {lane: [each for each in commands if each.lane is lane] for lane in Lane}
        outcomes = [self.run(each) for each in lanes[Lane.ALONE]]
        with ThreadPoolExecutor(1) as real_time, ThreadPoolExecutor(self._jobs) as simulations:
            running = [real_time.submit(self.run, each) for each in lanes[Lane.REAL_TIME]]
            running += [
                simulations.submit(self.run, each)
                for each in order_longest_first(lanes[Lane.SIMULATION])
            ]
            try:
                return outcomes + [each.result() for each in running]
            except BaseException:
                self.stop()
                raise

    def run(self, command: PageCommand) -> Outcome:
        """Run one command; return how it ended."""
        before = command.page.read_text(encoding="utf-8")
        words = [sys.executable, *command.words[1:]]
        if command.words[1:3] == ("-m", "experiments"):
            words += ["--output", str(command.page.parent)]
            words += ["--jobs", "1"] if command.lane is Lane.SIMULATION else []
        begin = time.monotonic()
        with tempfile.TemporaryFile() as log:
            status = self._run_process(words, command.lane is Lane.SIMULATION, log.fileno())
            log.seek(0)
            text = log.read().decode(errors="replace") if status else ""
        seconds = time.monotonic() - begin
        num_changed = count_changed_lines(before, command.page.read_text(encoding="utf-8"))
        outcome = Outcome(command, seconds, status, num_changed, text)
        self._report(outcome)
        return outcome

    def stop(self) -> None:
        """End the commands that run, and begin no further one."""
        with self._lock:
            self._is_stopped = True
            for process in self._running.values():
                _kill_group(process)

    def _run_process(self, words: list[str], yields_cpu: bool, log: int) -> int:
        with self._lock:
            if self._is_stopped:
                return -signal.SIGTERM
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            self._running[process.pid] = process
        if yields_cpu:
            _yield_cpu(process.pid)
        try:
            return process.wait(self._max_seconds)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL
        finally:
            _kill_group(process)
            process.wait()
            with self._lock:
                del self._running[process.pid]


def _yield_cpu(pid: int) -> None:
    """Give a process and its later children only the CPU time that all others leave.

    Linux may schedule sessions as groups (autogroup); a group has a priority of its own then.
    """
    with suppress(OSError):
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("19", encoding="ascii")


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a command with the processes that it left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def select(commands: Sequence[PageCommand], names: Sequence[str]) -> list[PageCommand]:
    """Return the commands of named pages, all without names.

    Raises:
        ValueError: No page with a command has a name.
    """
    known = {command.page.stem: command for command in commands}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{unknown[0]!r} is no page with a command: one of {', '.join(known)}")
    return [known[name] for name in names] if names else list(commands)


def make_parser() -> argparse.ArgumentParser:
    """Return the flags of the command."""
    parser = FlagParser(prog="python -m experiments.remake", description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="pages, such as slo (default all)")
    parser.add_argument(
        "--lane",
        choices=[lane.value for lane in Lane],
        help="only pages that need the machine alone, real time, or no certain time",
    )
    parser.add_argument(
        "--jobs",
        type=number_type(int, ge=1, le=1024),
        default=count_cores(),
        help="simulations at a time (default: one per core)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `python -m experiments.remake` and return the exit status."""
    values = make_parser().parse_args(argv)
    try:
        commands = select(read_commands(), values.pages)
    except ValueError as error:
        print(f"python -m experiments.remake: {error}", file=sys.stderr)
        return 2
    commands = [each for each in commands if values.lane in (None, each.lane.value)]
    if values.dry_run:
        for command in commands:
            last = "?" if command.seconds is None else f"{command.seconds:.0f}"
            print(f"{last:>6} s  {command.lane.value:11}{shlex.join(command.words)}")
        hours = estimate_seconds(commands, values.jobs) / 3600
        print(f"by these and their CPU times: {hours:.1f} h, {values.jobs} simulations at a time")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begin = time.monotonic()
    outcomes = PageRunner(values.jobs).run_all(commands)
    status = subprocess.run([sys.executable, *FINAL_COMMAND[1:]]).returncode
    failed = [outcome for outcome in outcomes if outcome.status]
    for outcome in failed:
        print(f"\n== {outcome.command.page.stem}: {shlex.join(outcome.command.words)}")
        print("\n".join(outcome.log.splitlines()[-30:]))
    print(
        f"{len(outcomes) - len(failed)} of {len(outcomes)} pages, {time.monotonic() - begin:.0f} s"
    )
    return 1 if failed or status else 0


if __name__ == "__main__":
    sys.exit(main())
