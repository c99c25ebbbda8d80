"""The README is true: its tree names what there is, its table has every flag. So is the table of
families."""

import re
from pathlib import Path

from gllm.models.registry import ARCHITECTURES
from gllm.serve import parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LEAVES = {"data", "demo", "routes", "vendor"}
"""Folders that the tree names without their contents."""


def tree() -> set[str]:
    """Paths of gllm/ that the README's tree names."""
    block = README.split("## Tree")[1].split("```")[1]
    found: set[str] = set()
    parents: list[str] = []
    for line in block.strip("\n").splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        parents = [*parents[:depth], name]
        found.add("".join(parents))
    return {path for path in found if path.startswith("gllm/") and path != "gllm/"}


def present() -> set[str]:
    """Folders and modules of gllm/."""
    paths = set()
    for path in (ROOT / "gllm").rglob("*"):
        inner = path.relative_to(ROOT)
        hidden = LEAVES & set(inner.parts[:-1]) or "__pycache__" in inner.parts
        if hidden or (path.is_file() and path.suffix != ".py"):
            continue
        if path.name == "__init__.py" and not path.read_text():
            continue
        paths.add(f"{inner}/" if path.is_dir() else str(inner))
    return paths


def test_the_tree_is_that_of_the_package() -> None:
    assert tree() == present()


def test_every_flag_is_in_the_table() -> None:
    table = README.split("## Flags")[1].split("## ")[0]
    rows = (line.split(" | ")[0] for line in table.splitlines())
    shown = {flag for row in rows for flag in re.findall(r"`(--[a-z-]+)`", row)}
    actions = (a for a in parser()._actions if a.dest not in ("help", "version"))
    assert shown == {flag for action in actions for flag in action.option_strings}


def test_every_architecture_is_in_the_table() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = text.split("## What is refused")[0].splitlines()
    first = (row.split(" | ")[0] for row in rows if row.startswith("| `"))
    assert {name for cell in first for name in re.findall(r"`(\w+)`", cell)} == set(ARCHITECTURES)
