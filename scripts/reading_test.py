"""Draw public names for the reading test: `python -m scripts.reading_test SEED [--docstrings]`.

A reader who knows vLLM but not gllm sees 30 names with their signatures, without bodies and
docstrings, and says what each is. With --docstrings the same names are printed with their
docstrings, for the judgement whether these are plain technical English.
"""

import argparse
import ast
import random
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COUNT = 30


class PublicName(NamedTuple):
    """A public class, function or method of gllm."""

    module: str
    name: str
    """Qualified name within the module."""
    signature: str
    docstring: str


def public_names(package: Path) -> list[PublicName]:
    """Return the public names of all modules below a package, in a fixed order."""
    names = []
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names += _public_members(module.removesuffix(".__init__"), "", tree.body)
    return names


def _public_members(module: str, prefix: str, body: list[ast.stmt]) -> list[PublicName]:
    names = []
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_"):
            continue
        name, docstring = f"{prefix}{node.name}", ast.get_docstring(node) or ""
        names.append(PublicName(module, name, _signature(node), docstring))
        if isinstance(node, ast.ClassDef):
            names += _public_members(module, f"{name}.", node.body)
    return names


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        fields = [
            f"{ast.unparse(field.target)}: {ast.unparse(field.annotation)}"
            for field in node.body
            if isinstance(field, ast.AnnAssign)
        ]
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases}): {', '.join(fields)}"
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {node.name}({ast.unparse(node.args)}){result}"


def draw(seed: int) -> list[PublicName]:
    """Return COUNT random public names of gllm."""
    return random.Random(seed).sample(public_names(ROOT / "gllm"), COUNT)


def main() -> None:
    """Print the names of a seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("seed", type=int)
    parser.add_argument("--docstrings", action="store_true")
    options = parser.parse_args()
    for number, each in enumerate(draw(options.seed), 1):
        print(f"{number}. {each.module}: {each.name}\n   {each.signature}")
        if options.docstrings:
            print("   " + (each.docstring or "(no docstring)").replace("\n", "\n   "))


if __name__ == "__main__":
    main()
