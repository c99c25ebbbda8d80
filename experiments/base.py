"""Result of an experiment: a Markdown page with plots and a comparison with the paper."""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from experiments.claims import PaperClaim, relative_change
from experiments.parallel import count_cores
from gllm.sim.metrics.report import format_table

PAPER_REFERENCE = 'arXiv 2504.14775 ("gLLM", SC\'25)'
OWN_REFERENCE = "none; the claims are our own aims"
"""In place of a paper."""


@dataclass(frozen=True)
class ExperimentOptions:
    """Options of an experiment run."""

    requests: int = 800
    """Number of requests per simulation."""
    quick: bool = False
    """Run a few points only, as a smoke test."""
    progress: bool = True
    jobs: int = field(default_factory=count_cores)
    """Number of processes for independent simulations."""
    results: Path | None = None
    """Folder in which an experiment keeps the results of its cases, and finds those of former runs;
    None: nothing is kept."""
    seconds: float = inf
    """Time after which no further case begins."""


@dataclass
class ExperimentResult:
    """Result of an experiment."""

    title: str
    text: str
    """Markdown text: setting and tables."""
    claims: list[PaperClaim] = field(default_factory=list)
    plots: dict[str, Callable[[Path], None]] = field(default_factory=dict)
    """Plot functions by file name."""
    reference: str = PAPER_REFERENCE
    """Paper of the claims."""
    measured: str = "ours"
    """Title of the figures that are judged."""


@dataclass(frozen=True)
class RunTime:
    """Time that an experiment took."""

    seconds: float
    cpu_seconds: float
    """Sum over all processes."""
    jobs: int

    def __str__(self) -> str:
        return (
            f"{self.seconds:.0f} s with --jobs {self.jobs} on {count_cores()} cores, "
            f"{self.cpu_seconds:.0f} s of CPU time"
        )


class Stopwatch:
    """Clock of an experiment; CPU time includes processes that have ended."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._begin = time.monotonic(), _cpu_seconds()

    def read(self) -> RunTime:
        """Return the time since the start."""
        seconds, cpu_seconds = self._begin
        return RunTime(time.monotonic() - seconds, _cpu_seconds() - cpu_seconds, self._jobs)


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def claims_table(claims: list[PaperClaim], measured: str = "ours") -> str:
    """Return a Markdown table of claimed and measured figures.

    Sign and size have columns of their own; a claim is met if everything it determines agrees.

    Args:
        claims: The claims; figures beside them get columns of their own.
        measured: Title of the figures that are judged.
    """
    titles = list(dict.fromkeys(title for claim in claims for title in claim.beside))
    words = {True: "yes", False: "no", None: "-"}
    rows = []
    for claim in claims:
        same_sign, same_size, is_met = claim.verdict
        met = "**miss**" if is_met is False else words[is_met]
        cells = [claim.quantity, str(claim.paper), claim.shown]
        cells += [claim.beside.get(title, "-") for title in titles]
        rows.append([*cells, words[same_sign], words[same_size], met])
    header = ["", "claimed", measured, *titles, "same sign", "within 2 x", "met"]
    return format_table(header, rows)


def format_change(value: float, base: float) -> str:
    """Return the difference between a value and a base as text, in per cent."""
    return f"{100 * relative_change(value, base):+.0f} %"


def write_result(
    result: ExperimentResult,
    name: str,
    command: str,
    folder: Path,
    run_time: RunTime | None = None,
) -> Path:
    """Write the page and its plots into a folder and return the path of the page.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file, draw in result.plots.items():
        draw(folder / file)
    pictures = "".join(f"\n![{file}]({file})\n" for file in result.plots)
    claims = ""
    if result.claims:
        table = claims_table(result.claims, result.measured)
        claims = f"\n## Beside what is claimed\n\nPaper: {result.reference}.\n\n{table}\n"
    took = f" Run time: {run_time}." if run_time else ""
    page = folder / f"{name}.md"
    page.write_text(
        f"# {result.title}\n\nMade by `{command}`; overwritten by it.{took}\n\n"
        f"{result.text.strip()}\n{claims}{pictures}",
        encoding="utf-8",
    )
    return page
