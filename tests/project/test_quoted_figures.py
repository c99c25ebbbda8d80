"""Figures that prose quotes from a page of results are on that page.

A sentence or table row that links to a page of docs/benchmarks or experiments/pages has its
measured figures from there: rounded, and in units that differ by a factor of 1,000 at most. One
that is computed from figures of the page has a comment beside it, as in
`<!-- 0.85 = 125 / 147 -->`, whose operands are on the page. So a new run changes the prose too, or
this test fails.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.sources import ROOT, name_of, pages, text_of

RESULTS = re.compile(r"\]\(([\w./-]*(?:benchmarks|experiments/pages)/[\w-]+\.md)(?:#[\w-]+)?\)")
CODE = re.compile(r"`[^`]*`|^(?: {4}|\t).*$|^```(?s:.*?)^```$", re.MULTILINE)
LINK_TARGET = re.compile(r"\]\([^)]*\)")
COMMENT = re.compile(r"<!-- ([\d.]+) = ([\d.,]+) / ([\d.,]+) -->")
NUMBER = r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?"
UNIT = r"(?:\s?%|\s?x\b|/s\b|\s(?:ms|s|us|GB|MB|MiB|tokens/s|requests/s|times)\b)"
RANGE = re.compile(rf"({NUMBER})(?: to ({NUMBER}))?{UNIT}|({NUMBER}\b)(?=\s*\|)")
"""A figure with a unit, both ends of a range, or a figure that ends a table cell."""
SENTENCE = re.compile(r"(?<=[.:;])\s+(?=[A-Z`\[*])|\n\s*- |\n(?=\|)")
SCALES = (1.0, 1e-3, 1e3)
"""Factors between the units of a page and those of the prose."""
OWN_PAGES = ("docs/benchmarks/", "docs/log.md")
"""Pages that are results, or that tell of runs whose results are not kept."""


@dataclass(frozen=True)
class QuotedFigure:
    """A figure of prose, and the pages of results that it is from."""

    text: str
    sources: tuple[Path, ...]
    comments: tuple[tuple[str, str, str], ...]


def quoted_figures(text: str, folder: Path) -> Iterator[QuotedFigure]:
    """Yield the figures of a page's sentences that link to pages of results.

    A table row without a link has the sources of the row above it.
    """
    for block in re.split(r"\n\s*\n", CODE.sub("", text)):
        comments = tuple(COMMENT.findall(block))
        sources: tuple[Path, ...] = ()
        for part in SENTENCE.split(COMMENT.sub("", block)):
            linked = [(folder / name).resolve() for name in RESULTS.findall(part)]
            is_row = part.startswith("|")
            sources = tuple(linked) or (sources if is_row else ())
            if not sources:
                continue
            # The first cell of a row says what was measured.
            figures = part.split("|", 2)[2] if is_row else part
            for match in RANGE.finditer(LINK_TARGET.sub("]", figures.replace("\n", " "))):
                for figure in filter(None, match.groups()):
                    yield QuotedFigure(figure, sources, comments)


def numbers_of(path: Path) -> list[float]:
    return [
        float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*(?:\.\d+)?", text_of(path))
    ]


def is_rounded(figure: str, value: float) -> bool:
    """Return True if a figure is a value rounded to the figure's last digit."""
    decimals = len(figure.partition(".")[2])
    quoted = float(figure.replace(",", ""))
    return abs(quoted - value) <= 0.5 * 10**-decimals * 1.001


def is_on_page(figure: str, path: Path) -> bool:
    return any(is_rounded(figure, value * scale) for value in numbers_of(path) for scale in SCALES)


def is_supported(figure: QuotedFigure) -> bool:
    """Return True if a figure is on a source, or a comment computes it from figures of one."""
    if any(is_on_page(figure.text, path) for path in figure.sources):
        return True
    return any(
        quoted == figure.text
        and is_rounded(quoted, float(first.replace(",", "")) / float(second.replace(",", "")))
        and any(
            {float(first.replace(",", "")), float(second.replace(",", ""))} <= set(numbers_of(path))
            for path in figure.sources
        )
        for quoted, first, second in figure.comments
    )


def test_quoted_figures_are_those_of_the_results() -> None:
    wrong: dict[str, list[str]] = {}
    num_figures = 0
    for page in pages():
        if name_of(page).startswith(OWN_PAGES):
            continue
        for figure in quoted_figures(text_of(page), page.parent):
            num_figures += 1
            if not is_supported(figure):
                sources = ", ".join(name_of(path) for path in figure.sources)
                wrong.setdefault(name_of(page), []).append(f"{figure.text} is not in {sources}")
    assert wrong == {}
    assert num_figures > 30, "figures are still found"


@pytest.mark.parametrize(
    ("text", "num_wrong"),
    [
        ("Its p99 is 138 ms ([weak links](benchmarks/weak-links.md)).", 0),
        ("Its p99 is 154 ms ([weak links](benchmarks/weak-links.md)).", 1),
        ("Its p99 is 138 to 154 ms ([weak links](benchmarks/weak-links.md)).", 1),
        ("Its p99 is 0.14 s ([weak links](benchmarks/weak-links.md)). Another is 154 ms.", 0),
        ("[Of](benchmarks/weak-links.md) 1.23 x. <!-- 1.23 = 100 / 138 -->", 1),
        ("[Of](benchmarks/weak-links.md) 7654.5 x. <!-- 7654.5 = 15309 / 2 -->", 1),
        ("| [p99](benchmarks/weak-links.md) | 138 |\n| the same | 15,4321 |", 1),
    ],
)
def test_a_figure_that_no_result_has_is_found(text: str, num_wrong: int) -> None:
    figures = list(quoted_figures(text, ROOT / "docs"))
    assert figures
    assert sum(not is_supported(figure) for figure in figures) == num_wrong
