"""Docstrings, classes and functions follow the rules for names and language of CONTRIBUTING.md."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.support.sources import name_of, sources, tree_of

OPENINGS = re.compile(r"(What|Whether|How|As of|Where|Why|That|Who|Of|So that)\b")
"""First words that hide what an object is or does."""


def docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of a module and of each class, function and constant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield getattr(node, "name", "module"), text
            for target, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(target, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                    value = after.value
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        yield ast.unparse(target).split(" =")[0], value.value


def bad_openings(tree: ast.Module) -> list[str]:
    """Return the names of objects whose docstring starts with a word of OPENINGS."""
    return [name for name, text in docstrings(tree) if OPENINGS.match(text)]


def test_docstrings_say_what_an_object_is() -> None:
    bad = {
        name_of(path): names
        for path in sources("gllm", "benchmarks")
        if (names := bad_openings(tree_of(path)))
    }
    assert bad == {}


def test_bad_opening_is_found() -> None:
    source = '"""Fine."""\nLIMIT = 1\n"""What is allowed."""\ndef f():\n    """Whether it is."""\n'
    assert sorted(bad_openings(ast.parse(source))) == ["LIMIT", "f"]


def classes_by_name() -> dict[str, list[str]]:
    """Return the files of gllm that define each class name."""
    files: dict[str, list[str]] = defaultdict(list)
    for path in sources("gllm"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(name_of(path))
    return files


def test_class_names_occur_once() -> None:
    twice = {name: files for name, files in classes_by_name().items() if len(files) > 1}
    assert twice == {}


SHARED_FUNCTION_NAMES = {"main", "make_parser", "plan", "build_spec", "install", "emit"}
"""Functions that every entry of a registry defines: commands, families, middleware, emitters."""


def functions_by_name() -> dict[str, list[str]]:
    """Return the files of gllm that define each public function at the top level.

    Forms of one kernel for several devices share a name: folders below gllm/kernels count as one.
    """
    files: dict[str, list[str]] = defaultdict(list)
    for path in sources("gllm"):
        name = name_of(path)
        place = "gllm/kernels" if name.startswith("gllm/kernels/") else name
        for node in tree_of(path).body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if not node.name.startswith("_") and place not in files[node.name]:
                files[node.name].append(place)
    return files


def test_names_of_public_functions_occur_once() -> None:
    twice = {
        name: files
        for name, files in functions_by_name().items()
        if len(files) > 1 and name not in SHARED_FUNCTION_NAMES
    }
    assert twice == {}
