"""Sources and pages of the project, each read and parsed once per process."""

import ast
from functools import cache, lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE_FOLDERS = ("gllm", "benchmarks", "examples", "scripts", "tests")


@cache
def text_of(path: Path) -> str:
    """Return the content of a file."""
    return path.read_text(encoding="utf-8")


@lru_cache(maxsize=1200)
def parse(source: str) -> ast.Module:
    """Return the syntax tree of a source; those of gllm/ fit into the cache."""
    return ast.parse(source)


def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a Python file."""
    return parse(text_of(path))


@cache
def sources(*folders: str) -> tuple[Path, ...]:
    """Return the Python files of folders, sorted."""
    return tuple(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


@cache
def pages() -> tuple[Path, ...]:
    """Return the documents of the project."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found += [*sorted((ROOT / "deploy").rglob("*.md")), ROOT / "gllm" / "demo" / "README.md"]
    return tuple(found)


def name_of(path: Path) -> str:
    """Return a path relative to the root."""
    return str(path.relative_to(ROOT))
