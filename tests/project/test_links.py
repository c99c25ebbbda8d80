"""Every relative link of the documents resolves: the file exists, and so does the anchor in it."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.sources import ROOT, name_of, pages, text_of

LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)|(?:src|href)=\"([^\"]+)\"")
"""The target of a Markdown link or image, or of an HTML attribute."""
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^(?: {4}|\t).*$", re.MULTILINE)
CODE_SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)


def prose_of(text: str) -> str:
    """Return a page without code blocks and code spans."""
    return CODE_SPAN.sub("", INDENTED.sub("", FENCE.sub("", text)))


def anchors_of(text: str) -> set[str]:
    """Return the anchors that GitHub generates for the headings of a page."""
    anchors = set()
    num_seen: Counter[str] = Counter()
    for heading in HEADING.findall(FENCE.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        anchors.add(f"{slug}-{num_seen[slug]}" if num_seen[slug] else slug)
        num_seen[slug] += 1
    return anchors


def broken_links(text: str, page: Path) -> set[str]:
    """Return the relative links of a page whose file or anchor does not exist."""
    broken = set()
    for markdown, attribute in LINK.findall(prose_of(text)):
        target = markdown or attribute
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            broken.add(target)
        elif anchor:
            linked = text if path == page else text_of(path)
            if anchor not in anchors_of(linked):
                broken.add(target)
    return broken


def test_links_of_pages_resolve() -> None:
    broken = {
        name_of(page): links for page in pages() if (links := broken_links(text_of(page), page))
    }
    assert broken == {}


def test_an_index_links_every_page_of_its_folder() -> None:
    for folder in ("docs", "docs/benchmarks", "docs/internals", "experiments/pages"):
        index = ROOT / folder / "README.md"
        targets = {markdown.split("#")[0] for markdown, _ in LINK.findall(text_of(index))}
        names = {path.name for path in index.parent.glob("*.md")} - {"README.md"}
        assert names - targets == set(), folder


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("[a](docs/api.md) ![b](docs/images/chat-light.png) [c](https://example.com/gone)", set()),
        ("[a](docs/gone.md)", {"docs/gone.md"}),
        ('<img src="docs/images/gone.png" width="3">', {"docs/images/gone.png"}),
        ("# Two words\n[a](#two-words) [b](#three-words)", {"#three-words"}),
        ("[a](docs/flags.md#engine-and-scheduler) [b](docs/flags.md#gone)", {"docs/flags.md#gone"}),
        ("# `a_b`: c, d\n# Same\n# Same\n[a](#a_b-c-d) [b](#same-1) [c](#same-2)", {"#same-2"}),
        ("`[a](docs/gone.md)`\n\n    [b](docs/gone.md)\n\n```\n[c](docs/gone.md)\n```\n", set()),
    ],
)
def test_a_broken_link_is_found(text: str, broken: set[str]) -> None:
    assert broken_links(text, ROOT / "README.md") == broken
