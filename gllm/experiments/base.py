"""What an experiment gives: a page of Markdown and its plots.

Owns the form of results and how ours stand beside the paper's. Knows no experiment.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gllm.sim.report import format_table

PAPER_REFERENCE = 'arXiv 2504.14775 ("gLLM", SC\'25)'


@dataclass(frozen=True)
class ExperimentOptions:
    """How an experiment is run."""

    requests: int = 800
    """Requests of each simulation."""
    quick: bool = False
    """Few points, to see that it works."""
    progress: bool = True


class PaperClaim(NamedTuple):
    """A figure of the paper, and ours."""

    quantity: str
    paper: str
    ours: str
    is_met: bool | None
    """None: there is nothing to hold it against."""


@dataclass
class ExperimentResult:
    """What came out."""

    title: str
    text: str
    """Markdown: setting, tables."""
    claims: list[PaperClaim] = field(default_factory=list)
    plots: dict[str, Callable[[Path], None]] = field(default_factory=dict)
    """File name and how to draw it."""


def claims_table(claims: list[PaperClaim]) -> str:
    """Ours beside the paper's."""
    verdict = {True: "yes", False: "**miss**", None: "-"}
    rows = [[c.quantity, c.paper, c.ours, verdict[c.is_met]] for c in claims]
    return format_table(["", "claimed", "ours", "met"], rows)


def format_change(value: float, base: float) -> str:
    """How far a value is from a base, in per cent."""
    return f"{100 * (value / base - 1):+.0f} %"


def write_result(result: ExperimentResult, name: str, command: str, folder: Path) -> Path:
    """Write the page and its plots into a folder; the page's path. Raises OSError."""
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
