"""Every file and every symbol that a document or a docstring names exists."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.sources import CODE_FOLDERS, ROOT, name_of, pages, sources, text_of, tree_of

SOURCES = sources(*CODE_FOLDERS)
SUFFIXES = "py|md|cpp|h|js|css|json|jsonl|csv|toml|yaml|txt"
FILE = re.compile(rf"(?<![\w/.:<-])((?:[\w.-]+/)+[\w-]+\.(?:{SUFFIXES}))(?![\w/])")
"""A path with at least one folder."""
MODULE = re.compile(r"(?<![\w/.-])gllm(?:\.[A-Za-z_]\w*)+(?![\w/-])")
MEMBER = re.compile(r"`(?:[\w.]+\.)?([A-Z]\w*)\.([a-z_]\w*)(?:\(\))?`")
"""A member of a class, in backticks."""
CLASS = re.compile(r"^\s*class (\w+)", re.MULTILINE)
PLACEHOLDER = re.compile(r"NAME|FOLDER|FILE|^out/")
WRITTEN = {"docs/benchmarks/gpu.json"}
"""Files that a command writes."""
EXAMPLES = {
    "gllm/frontend/fields/count.py",
    "gllm/frontend/routes/count.py",
    "gllm/kernels/clip.py",
    "gllm/kernels/linear_bf16.py",
    "gllm/kernels/native/clip.cpp",
    "gllm/kernels/triton/clip.py",
    "tests/kernels/test_clip.py",
    "tests/triton/test_clip.py",
}
"""Files that docs/extend.md creates as examples."""
OTHER_NAMES = {
    "gllm.request_id",
    "gllm.resumptions",
    "gllm.service",
    "gllm.kernels.linear_bf16",
    "gllm.transport.copied",
}
"""Attributes of spans, a unit of systemd, and modules that docs/extend.md creates as examples."""


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield every string that stands alone in a Python source."""
    # Statements stand in statements alone, so expressions are not searched.
    pending: list[ast.AST] = [tree]
    for node in pending:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                pending.append(child)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            value = node.value.value
            if isinstance(value, str):
                yield value


def prose_of(path: Path) -> str:
    """Return the prose of a page, or of a Python source."""
    return "\n".join(docstrings(tree_of(path))) if path.suffix == ".py" else text_of(path)


def file_exists(name: str, page: Path) -> bool:
    """Return True if a path exists, seen from the root, from gllm/ or from the page's folders."""
    places = [ROOT, ROOT / "gllm", *page.parents[: len(page.relative_to(ROOT).parts)]]
    return any((place / name).exists() for place in places)


def module_exists(name: str) -> bool:
    """Return True if a dotted name is a module, or a name that one defines."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:length])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.exists():
                rest = parts[length:]
                return not rest or rest[0] in top_level_names(path)
    return False


def top_level_names(path: Path) -> set[str]:
    """Return the names that a module defines or imports."""
    names: set[Any] = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        else:
            names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            # `__all__` names what a module loads on first use.
            names |= {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
    return names


@cache
def class_files() -> dict[str, set[Path]]:
    """Return the files that may define each class of the project."""
    files: dict[str, set[Path]] = {}
    for path in SOURCES:
        for name in CLASS.findall(text_of(path)):
            files.setdefault(name, set()).add(path)
    return files


@cache
def class_members(name: str) -> set[str] | None:
    """Return the members of all classes with a name; None if the project has no such class."""
    nodes = [
        node
        for path in class_files().get(name, ())
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return set().union(*map(members_of, nodes)) if nodes else None


def members_of(node: ast.ClassDef) -> set[str]:
    """Return the names that a class body or its methods define, and those of its bases."""
    names: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(each.name)
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            names.add(each.attr)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            names.add(each.id)
        elif isinstance(each, ast.arg):
            names.add(each.arg)
    return names


def unknown_references(text: str, page: Path) -> set[str]:
    """Return the files, modules and members that a text names and that do not exist."""
    files = {
        name
        for name in FILE.findall(text)
        if not PLACEHOLDER.search(name)
        and name not in WRITTEN | EXAMPLES
        and not file_exists(name, page)
    }
    modules = {name for name in MODULE.findall(text) if not module_exists(name)}
    members = {
        f"{owner}.{name}"
        for owner, name in MEMBER.findall(text)
        if (known := class_members(owner)) is not None and name not in known
    }
    return files | (modules - OTHER_NAMES) | members


@pytest.mark.full
def test_what_a_text_names_exists() -> None:
    unknown = {
        name_of(page): names
        for page in (*pages(), *SOURCES)
        if (names := unknown_references(prose_of(page), page))
    }
    assert unknown == {}


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("see gllm/serve.py and docs/api.md, or `Scheduler.schedule`", set()),
        ("see gllm/kernels/gone.py", {"gllm/kernels/gone.py"}),
        ("`gllm.scheduler.gone`", {"gllm.scheduler.gone"}),
        ("`Scheduler.gone`", {"Scheduler.gone"}),
        ("`gllm.scheduler.scheduler.Scheduler.gone()`", {"Scheduler.gone"}),
    ],
)
def test_a_reference_to_nothing_is_found(text: str, unknown: set[str]) -> None:
    assert unknown_references(text, ROOT / "README.md") == unknown
