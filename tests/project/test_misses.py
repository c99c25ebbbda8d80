"""The explained misses are claims that their pages miss, with figures of the pages they link to."""

import re
from pathlib import Path

import pytest

from scripts.claims_page import FOLDER, read_claims
from tests.project.test_quoted_figures import CODE, LINK_TARGET, RANGE, is_on_page
from tests.support.sources import text_of

PAGE = FOLDER / "misses.md"
LINKED = re.compile(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)")
NUM_MISSES = 10


def sections() -> dict[str, str]:
    """Return the text of each explained miss by its heading."""
    parts = text_of(PAGE).split("\n## ")[1:]
    return dict(part.split("\n", 1) for part in parts)


def claim_of(section: str) -> tuple[list[str], Path]:
    """Return quantity, claimed and measured figure of a section, and the page that has them."""
    row = [line for line in section.splitlines() if line.startswith("|")][2]
    *claim, link = (cell.strip() for cell in row.strip("|").split("|"))
    (name,) = LINKED.findall(link)
    return claim, FOLDER / name


def unsupported_figures(section: str) -> list[str]:
    """Return the figures with a unit in the prose of a section that no page it links to has."""
    linked = {(FOLDER / name).resolve() for name in LINKED.findall(section)}
    prose = "\n".join(line for line in section.splitlines() if not line.startswith("|"))
    prose = LINK_TARGET.sub("]", CODE.sub("", prose).replace("\n", " "))
    figures = [figure for match in RANGE.finditer(prose) for figure in filter(None, match.groups())]
    return [figure for figure in figures if not any(is_on_page(figure, page) for page in linked)]


def test_there_are_ten_of_at_least_six_systems() -> None:
    pages = [read_claims(claim_of(section)[1]) for section in sections().values()]
    assert len(pages) == NUM_MISSES
    assert len({page.system for page in pages if page}) >= 6


@pytest.mark.parametrize("heading", sections())
def test_a_miss_stands_in_the_claims_of_its_page(heading: str) -> None:
    claim, path = claim_of(sections()[heading])
    page = read_claims(path)
    assert page
    assert claim in [row[:3] for row in page.rows if row[-1] == "**miss**"]


@pytest.mark.parametrize("heading", sections())
def test_its_figures_are_on_the_linked_pages(heading: str) -> None:
    assert unsupported_figures(sections()[heading]) == []


def test_a_figure_that_no_linked_page_has_is_found() -> None:
    text = "TTFT is 123.456 s ([page](aladdin.md#misses)), limits are 1.6 s."
    assert unsupported_figures(text) == ["123.456"]
