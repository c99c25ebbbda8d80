"""Reference pages in docs/ are current."""

import re
from pathlib import Path

from gllm.models.registry import ARCHITECTURES, multimodal_classes
from scripts import flags_page, models_page

ROOT = Path(__file__).parents[2]


def test_flags_page_is_current() -> None:
    assert flags_page.PAGE.read_text(encoding="utf-8") == flags_page.page()


def test_models_page_is_current() -> None:
    assert models_page.PAGE.read_text(encoding="utf-8") == models_page.page()


def test_every_architecture_is_in_the_table() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = text.split("## What is refused")[0].splitlines()
    first = (row.split(" | ")[0] for row in rows if row.startswith("| `"))
    named = {name for cell in first for name in re.findall(r"`(\w+)`", cell)}
    assert named == {*ARCHITECTURES, *multimodal_classes()}
