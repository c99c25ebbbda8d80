"""The Python snippets of docs/extend.md use names that exist."""

import ast
import builtins
import importlib
import re
import textwrap
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "extend.md"
SNIPPET = re.compile(r"^( *)```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
MODULES = (
    "asyncio",
    "ctypes",
    "dataclasses",
    "gllm.options.field_types",
    "gllm.options.limits",
    "gllm.frontend.context",
    "gllm.frontend.endpoint",
    "gllm.frontend.fields.base",
    "gllm.frontend.fields.parsing",
    "gllm.frontend.json_encoding",
    "gllm.frontend.server_response_schemas",
    "gllm.kernels.native.library",
    "gllm.kernels.weight_format",
    "gllm.transport.shared_memory",
    "tests.support.models.tiny_models",
    "typing",
)
"""Modules whose names the snippets use without an import; guides name the file to copy instead."""
OTHER_NAMES = {"web", "pytest", "torch", "functional", "server_schemas", "count", "clip"}
OTHER_NAMES |= {"Sequence", "ClipArguments", "CountFields"}
"""Foreign modules, and names that other snippets of the same guide define."""


def snippets() -> list[ast.AST]:
    """Return the snippets, parsed; a line of a table is parsed as a dict with this line."""
    parsed: list[ast.AST] = []
    for _, body in SNIPPET.findall(GUIDE.read_text(encoding="utf-8")):
        source = textwrap.dedent(body)
        is_dict_item = re.match(r'"[\w-]+": ', source) is not None
        parsed.append(ast.parse(f"{{{source}}}" if is_dict_item else source))
    return parsed


def used_names(tree: ast.AST) -> set[str]:
    """Return the names that a snippet loads and does not define."""
    names = {each for each in ast.walk(tree) if isinstance(each, ast.Name)}
    defined = {each.id for each in names if isinstance(each.ctx, ast.Store)}
    for each in ast.walk(tree):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(each.name)
        elif isinstance(each, ast.arg):
            defined.add(each.arg)
        elif isinstance(each, ast.ImportFrom | ast.Import):
            defined |= {alias.asname or alias.name for alias in each.names}
    return {each.id for each in names if isinstance(each.ctx, ast.Load)} - defined


def test_names_of_snippets_exist() -> None:
    known = set(dir(builtins)) | OTHER_NAMES
    for module in MODULES:
        known |= set(dir(importlib.import_module(module)))
    # Names that an example file would define.
    used = set().union(*map(used_names, snippets()))
    assert {name for name in used - known if not name.startswith(("Bf16", "Copying"))} == set()


def test_imports_of_snippets_resolve() -> None:
    for each in (node for tree in snippets() for node in ast.walk(tree)):
        if isinstance(each, ast.ImportFrom) and each.module != "gllm.kernels.triton":
            module = importlib.import_module(each.module or "")
            assert all(hasattr(module, alias.name) for alias in each.names), each.module
