"""Write the generated parts of docs/architecture.md: `python -m scripts.architecture_page`."""

from pathlib import Path

from scripts.page_parts import replace_parts
from scripts.rooms import floors_table

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
PARTS = {"floors": floors_table}
"""By name of the part: the function that returns its text."""


def with_current_parts(page: str) -> str:
    """Return the page with its generated parts up to date."""
    return replace_parts(page, PARTS)


if __name__ == "__main__":
    PAGE.write_text(with_current_parts(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
