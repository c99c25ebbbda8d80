"""`make serve` installs what serving imports, and nothing else."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.sources import ROOT, text_of, tree_of

ENTRY_MODULES = (
    "gllm.__main__",
    "gllm.serve",
    "gllm.engine.engine",
    "gllm.frontend.server",
    "gllm.runtime.worker.__main__",
    "gllm.commands.router",
    "gllm.commands.chat",
    "gllm.commands.top.command",
    "gllm.commands.bench.serve",
)
"""Modules that a server and its first clients run, or import by name."""
PACKAGES = {"jinja2": "Jinja2", "yaml": "PyYAML", "zmq": "pyzmq"}
"""Packages whose modules have another name."""
OPTIONAL = {"matplotlib", "opentelemetry", "pynvml", "ray", "transformers", "triton"}
"""Modules that a flag, a GPU or the tokenizer of an older model needs; imported when they are."""


def imported_modules(statements: list[ast.stmt], with_functions: bool) -> Iterator[str]:
    """Yield the modules that statements import, at once or also when functions are called."""
    pending: list[ast.AST] = list(statements)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not with_functions:
            continue
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            children = ast.iter_child_nodes(node)
            pending += (c for c in children if isinstance(c, ast.stmt | ast.ExceptHandler))


def source_of(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    return next(filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py")), None)


def packages_of_serving(with_functions: bool) -> set[str]:
    """Return the packages that serving imports, at once or also when functions are called."""
    packages: set[str] = set()
    pending, seen = list(ENTRY_MODULES), set[str]()
    while pending:
        module = pending.pop()
        source = source_of(module)
        if module in seen or source is None:
            continue
        seen.add(module)
        for name in imported_modules(tree_of(source).body, with_functions):
            first = name.partition(".")[0]
            if first == "gllm":
                pending += [name, name.rpartition(".")[0]]
            elif first not in sys.stdlib_module_names:
                packages.add(first)
    return packages


def test_serving_imports_what_its_requirements_install() -> None:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    installed = {line.partition("==")[0] for line in lines if line and line[0] != "#"} | {"torch"}
    needed = {PACKAGES.get(name, name) for name in packages_of_serving(True) - OPTIONAL}
    # Modules that the registry of models names read weights by safetensors.
    assert needed | {"safetensors"} == installed
    assert packages_of_serving(False) & OPTIONAL == set()


def test_make_serve_installs_the_requirements_of_serving_alone() -> None:
    makefile = text_of(ROOT / "Makefile")
    assert "\nserve: $(SERVE_STAMP)\n" in makefile
    recipe = makefile.partition("\n$(SERVE_STAMP):")[2].partition("\n\n")[0]
    installs = re.findall(r"\$\(INSTALL\) (.+)", recipe)
    assert installs == ["torch==2.13.0", "-r requirements.txt", "--no-deps -e ."]


def test_make_lint_runs_the_fast_checks_first() -> None:
    recipe = text_of(ROOT / "Makefile").partition("\nlint: ")[2].partition("\n\n")[0]
    assert re.findall(r"\$\(BIN\)/(.+)", recipe) == [
        "ruff format --check .",
        "ruff check .",
        "mypy",
    ]
