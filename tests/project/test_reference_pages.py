"""Reference pages in docs/ are current."""

import re
from pathlib import Path

from gllm.models.registry import ARCHITECTURES, multimodal_classes
from scripts import claims_page, flags_page, models_page

ROOT = Path(__file__).parents[2]


def test_flags_page_is_current() -> None:
    assert flags_page.PAGE.read_text(encoding="utf-8") == flags_page.page()


def test_models_page_is_current() -> None:
    assert models_page.PAGE.read_text(encoding="utf-8") == models_page.page()


def test_claims_page_is_current() -> None:
    assert claims_page.PAGE.read_text(encoding="utf-8") == claims_page.page()


def test_every_claim_of_the_pages_is_counted() -> None:
    """A page whose table has another form would be left out without a word."""
    pages = [path for path in claims_page.FOLDER.glob("*.md") if path != claims_page.PAGE]
    claims = [each for path in pages if (each := claims_page.read_claims(path))]
    verdicts = {"yes", "**miss**", "-"}
    assert all(row[-1] in verdicts for each in claims for row in each.rows)
    text = "".join(path.read_text(encoding="utf-8") for path in pages)
    assert sum(each.count("**miss**") for each in claims) == text.count("| **miss** |")
    parts = [part for each in claims for part in each.split_by_system()]
    assert sum(len(part.rows) for part in parts) == sum(len(each.rows) for each in claims)
    named = {each.system for each in parts}
    assert named == {*claims_page.SYSTEMS, claims_page.OWN}


def test_own_aims_count_apart_from_the_claims_of_a_paper() -> None:
    rows = [
        [text, text, "1", "yes"] for text in ("+10 %", "aim: <= 5 %", "our own aim: <= 0", "aims")
    ]
    page = claims_page.PageClaims(Path("tetri.md"), "TetriInfer", rows)
    papers, own = page.split_by_system()
    assert (papers.system, [row[0] for row in papers.rows]) == ("TetriInfer", ["+10 %", "aims"])
    assert (own.system, len(own.rows)) == (claims_page.OWN, 2)
    assert own.split_by_system() == [own]


def test_every_architecture_is_in_the_table() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = text.split("## What is refused")[0].splitlines()
    first = (row.split(" | ")[0] for row in rows if row.startswith("| `"))
    named = {name for cell in first for name in re.findall(r"`(\w+)`", cell)}
    assert named == {*ARCHITECTURES, *multimodal_classes()}
