"""Count the size of the project: `python -m scripts.census [TREE]`.

Lines of code are without blanks, comments and docstrings. Words of docs are those of docs/,
README.md and CONTRIBUTING.md.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def docstring_lines(tree: ast.Module) -> Iterator[int]:
    """Yield the numbers of the lines of strings that stand alone."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def count_code_lines(source: str) -> int:
    """Return the number of lines of a Python source that have code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - set(docstring_lines(ast.parse(source))))


def count(tree: Path) -> dict[str, int]:
    """Return the figures of a checkout by name."""
    modules = [path.read_text("utf-8") for path in (tree / "gllm").rglob("*.py")]
    tests = [path.read_text("utf-8") for path in (tree / "tests").rglob("*.py")]
    pages = [*(tree / "docs").rglob("*.md"), tree / "README.md", tree / "CONTRIBUTING.md"]
    rooms = {path.parent for path in (tree / "gllm").glob("*/__init__.py")}
    return {
        "packages": len(rooms | {tree / "gllm" / "demo"}),
        "files": len(modules),
        "lines": sum(text.count("\n") for text in modules),
        "lines of code": sum(map(count_code_lines, modules)),
        "lines of tests": sum(text.count("\n") for text in tests),
        "pages": len(pages),
        "words of docs": sum(len(page.read_text("utf-8").split()) for page in pages),
    }


if __name__ == "__main__":
    for name, number in count(Path(sys.argv[1] if sys.argv[1:] else ".")).items():
        print(f"{name:15}{number:9,}")
