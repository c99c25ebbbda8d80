"""Lines of code beside gLLM's Table 1; its other column is the quality of a model on GPUs."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import gllm
from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedDirection, ExpectedFigure, PaperClaim, relative_change
from gllm.sim.metrics.plots import plot_bars
from gllm.sim.metrics.report import format_table
from scripts.census import count_code_lines


class CodeSize(NamedTuple):
    """Size of a Python package."""

    num_files: int
    num_lines: int
    """With blanks, comments and docstrings."""
    num_code_lines: int
    """Without them."""

    def __add__(self, other: object) -> "CodeSize":
        """Return the size of both."""
        if not isinstance(other, CodeSize):
            return NotImplemented
        return CodeSize(*(mine + its for mine, its in zip(self, other, strict=True)))


SERVERS = {
    "gLLM, the authors' package 0.0.6.post1": CodeSize(61, 15_239, 11_759),
    "SGLang 0.4.3.post2": CodeSize(209, 74_779, 57_205),
    "vLLM 0.8.1": CodeSize(668, 226_873, 158_968),
}
"""Wheels of the package index, counted by `count_package`; of SGLang without its `test` folder."""
RIVALS = ("SGLang 0.4.3.post2", "vLLM 0.8.1")
"""Servers that the paper's table compares."""
PAPER_LINES = 6_000
"""Of gLLM, by its authors (README of June 2025: about 6 k)."""
BESIDE = ("sim", "plan", "deploy", "recovery", "router", "routing", "pacing")
"""Parts of this project beside a server of one engine: simulator, planners, fleets, weak links."""
NOTE = """\
Python files of the installed package, without tests; *code*: without blanks, comments and
docstrings (`scripts.census.count_code_lines`). The other packages are the wheels of the package
index, counted the same way; the versions of SGLang and vLLM are the paper's. C++ and CUDA sources
are not counted. *Server alone* leaves out {beside}. The figures of the paper's table are not at
hand: its gLLM is judged by its authors' own figure of the time, about 6,000 lines. The authors'
newer package has more models and kernels."""


def count_package(folder: Path) -> CodeSize:
    """Return the size of the Python files below a folder."""
    size = CodeSize(0, 0, 0)
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text("utf-8")
        size += CodeSize(1, text.count("\n"), count_code_lines(text))
    return size


def count_parts() -> dict[str, CodeSize]:
    """Return the size of each package of this project."""
    root = Path(gllm.__file__).parent
    folders = [path for path in sorted(root.iterdir()) if path.is_dir()]
    parts = {path.name: count_package(path) for path in folders}
    parts = {name: each for name, each in parts.items() if each.num_files}
    modules = sorted(root.glob("*.py"))
    top = CodeSize(
        len(modules),
        sum(path.read_text("utf-8").count("\n") for path in modules),
        sum(count_code_lines(path.read_text("utf-8")) for path in modules),
    )
    return {"modules of no package": top, **parts}


def add_sizes(parts: Mapping[str, CodeSize], without: tuple[str, ...] = ()) -> CodeSize:
    """Return the size of all parts but some."""
    size = CodeSize(0, 0, 0)
    for name, each in parts.items():
        if name not in without:
            size += each
    return size


def _table(sizes: Mapping[str, CodeSize], title: str) -> str:
    rows = [
        [name, str(each.num_files), *(f"{count / 1e3:.1f}" for count in each[1:])]
        for name, each in sizes.items()
    ]
    return format_table([title, "files", "lines, thousands", "code, thousands"], rows)


def size_claims(whole: CodeSize, server: CodeSize) -> list[PaperClaim]:
    """Return the size beside the authors' and beside other servers."""

    def beside(text: str) -> Mapping[str, str]:
        return {"server alone": text}

    claims = [
        PaperClaim(
            "Table 1: lines of gLLM",
            ExpectedFigure(PAPER_LINES / 1e3, "thousand", 1),
            whole.num_code_lines / 1e3,
            beside=beside(f"{server.num_code_lines / 1e3:.1f} thousand"),
        )
    ]
    for other in RIVALS:
        base = SERVERS[other].num_code_lines
        claims.append(
            PaperClaim(
                f"Table 1: lines of gLLM against {other}",
                ExpectedDirection(False, "far fewer"),
                relative_change(whole.num_code_lines, base),
                beside=beside(f"{100 * relative_change(server.num_code_lines, base):+.0f} %"),
            )
        )
    claims.append(
        PaperClaim(
            "Table 1: MMLU-Pro of Qwen2.5-32B-Instruct",
            "68.86, of the others 68.85 and 69.17",
            None,
            "not run: no device here holds the model",
        )
    )
    return claims


def run(options: ExperimentOptions) -> ExperimentResult:
    """Count this project, and return the page."""
    parts = count_parts()
    whole, server = add_sizes(parts), add_sizes(parts, BESIDE)
    sizes = {"this project": whole, "this project, server alone": server, **SERVERS}
    note = NOTE.format(beside=", ".join(f"`gllm.{name}`" for name in BESIDE))
    bars = {name: {"code": each.num_code_lines / 1e3} for name, each in sizes.items()}
    return ExperimentResult(
        "Lines of code",
        f"{note}\n\n{_table(sizes, 'system')}\n\n## Parts\n\n{_table(parts, 'package')}\n",
        size_claims(whole, server),
        {
            "code-size.svg": lambda path: plot_bars(
                bars, path, "thousand lines of code", "Python code without blanks and comments"
            )
        },
    )
