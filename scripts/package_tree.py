"""The package tree of gllm, one line per folder, from the docstrings of the packages."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "gllm"


def package_tree() -> str:
    """Return a Markdown list of gllm's packages, each with the first line of its docstring.

    Raises ValueError for a package without a docstring.
    """
    return "".join(
        f"{'  ' * (len(path.relative_to(PACKAGE).parts) - 2)}- `{_name(path)}` {_summary(path)}\n"
        for path in sorted(PACKAGE.rglob("__init__.py"), key=lambda path: path.parent)
        if path.parent != PACKAGE
    )


def _name(path: Path) -> str:
    return f"{path.parent.relative_to(PACKAGE).as_posix()}/"


def _summary(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(f"{path} needs a docstring: docs/architecture.md shows its first line")
    return docstring.splitlines()[0]
