"""Pages of docs/benchmarks: generated figures between marks, with text around them that stays."""

import argparse
import datetime
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.policies import processor

BEGIN, END = "<!-- figures, overwritten by the command -->", "<!-- end of figures -->"
RESULTS_SUFFIX = ".json"
"""Suffix of the file beside a page that has its figures as data."""
Section = tuple[str, Callable[[list[dict[str, Any]]], str]]
"""Title of a section, and the formatter of its rows."""


def origin(module: str) -> str:
    """Return the command, absolute paths shortened to names, and the machine."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    command = shlex.join(["python", "-m", module, *words])
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    return (
        f"Made by `{command}`. {os.cpu_count()} cores, {processor()}, {versions}, "
        f"{datetime.date.today()}."
    )


def make_parser(
    doc: str | None, page: str, rounds: int, model: str | None = None
) -> argparse.ArgumentParser:
    """Return a parser of the flags that benchmarks of a served model share: model, rounds, output.

    Args:
        doc: The command's docstring; its first line is the description.
        page: Name of the page in docs/benchmarks, without suffix.
        rounds: Default number of rounds.
        model: Default of the model; None: it has to be given.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    model_help = "a Hugging Face folder" + (f" (default {model})" if model else "")
    parser.add_argument("--model", default=model, required=model is None, help=model_help)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--output", type=page_path, default=Path(f"docs/benchmarks/{page}.md"))
    return parser


def page_path(text: str) -> Path:
    """Return the page that an option names.

    Raises:
        argparse.ArgumentTypeError: the name is that of the results, which lie beside the page.
    """
    path = Path(text)
    if path.suffix == RESULTS_SUFFIX:
        raise argparse.ArgumentTypeError(
            f"{text} would hold the results, which lie beside the page: name the page, "
            f"{path.with_suffix('.md')}"
        )
    return path


def read_results(page: Path) -> dict[str, Any]:
    """Return the results of earlier runs beside a page; none without a file."""
    path = page.with_suffix(RESULTS_SUFFIX)
    return msgspec.json.decode(path.read_bytes()) if path.exists() else {}


def format_sections(sections: Mapping[str, Section], results: dict[str, Any]) -> str:
    """Format the sections that have been measured, each with its origin.

    Args:
        sections: Title and formatter of each section, in the order of the page.
        results: Rows of each section, and the origins by section.
    """
    return "\n\n".join(
        f"## {title}\n\n{results['origins'][name]}\n\n{form(results[name])}"
        for name, (title, form) in sections.items()
        if name in results
    )


def write_figures(path: Path, title: str, figures: str) -> None:
    """Write figures between the page's marks; keep the rest of an existing page."""
    text = path.read_text(encoding="utf-8") if path.is_file() else f"# {title}\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n\n{figures.strip()}\n\n{END}{after}", encoding="utf-8")


def write_results(page: Path, title: str, figures: str, results: dict[str, Any]) -> None:
    """Write the figures to the page and the results to a JSON file beside it; print the figures."""
    write_figures(page, title, figures)
    page.with_suffix(RESULTS_SUFFIX).write_bytes(
        msgspec.json.format(msgspec.json.encode(results)) + b"\n"
    )
    print(figures)


class ForeignCpu:
    """CPU time that other processes have used on this machine since construction."""

    def __init__(self) -> None:
        self._begin = self._now()

    def cores(self) -> float:
        """Return the average number of cores that processes outside this process tree kept busy."""
        (begin, all_begin, own_begin), (end, all_end, own_end) = self._begin, self._now()
        return max(0.0, (all_end - all_begin - own_end + own_begin) / max(end - begin, 1e-9))

    def own_cores(self) -> float:
        """Return the average number of cores that this process tree kept busy.

        Processes that have ended since do not count.
        """
        (begin, _, own_begin), (end, _, own_end) = self._begin, self._now()
        return max(0.0, (own_end - own_begin) / max(end - begin, 1e-9))

    def _now(self) -> tuple[float, float, float]:
        """Return CPU seconds since boot: elapsed per core, of all processes, of this tree."""
        tick = os.sysconf("SC_CLK_TCK")
        fields = [int(x) / tick for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        busy = sum(fields) - fields[3] - fields[4]
        return sum(fields) / (os.cpu_count() or 1), busy, sum(map(_cpu_seconds, _tree(os.getpid())))


def _tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(c) for t in threads for c in (t / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(each for child in children for each in _tree(child))]


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of its children that have exited."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
