"""Result of an experiment: a Markdown page with plots and a comparison with the paper."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gllm.sim.metrics.report import format_table

PAPER_REFERENCE = 'arXiv 2504.14775 ("gLLM", SC\'25)'


@dataclass(frozen=True)
class ExperimentOptions:
    """Options of an experiment run."""

    requests: int = 800
    """Number of requests per simulation."""
    quick: bool = False
    """Run a few points only, as a smoke test."""
    progress: bool = True


class PaperClaim(NamedTuple):
    """A figure of the paper beside the measured one."""

    quantity: str
    paper: str
    ours: str
    is_met: bool | None
    """None if the paper has no number to compare with."""


@dataclass
class ExperimentResult:
    """Result of an experiment."""

    title: str
    text: str
    """Markdown text: setting and tables."""
    claims: list[PaperClaim] = field(default_factory=list)
    plots: dict[str, Callable[[Path], None]] = field(default_factory=dict)
    """Plot functions by file name."""


def claims_table(claims: list[PaperClaim]) -> str:
    """Return a Markdown table of claimed and measured figures."""
    verdict = {True: "yes", False: "**miss**", None: "-"}
    rows = [[c.quantity, c.paper, c.ours, verdict[c.is_met]] for c in claims]
    return format_table(["", "claimed", "ours", "met"], rows)


def format_change(value: float, base: float) -> str:
    """Return the difference between a value and a base as text, in per cent."""
    return f"{100 * (value / base - 1):+.0f} %"


def write_result(result: ExperimentResult, name: str, command: str, folder: Path) -> Path:
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
        table = claims_table(result.claims)
        claims = f"\n## Beside what is claimed\n\nPaper: {PAPER_REFERENCE}.\n\n{table}\n"
    page = folder / f"{name}.md"
    page.write_text(
        f"# {result.title}\n\nMade by `{command}`; overwritten by it.\n\n"
        f"{result.text.strip()}\n{claims}{pictures}",
        encoding="utf-8",
    )
    return page
