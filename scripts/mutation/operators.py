"""Small faults in a source file: one changed operator, constant, condition or statement each."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
SILENT = re.compile(r"log|warn|debug|info|print|progress|describe", re.IGNORECASE)
"""Calls that only tell somebody something."""
CPP = (
    (re.compile(r" < "), " <= "),
    (re.compile(r" > "), " >= "),
    (re.compile(r" <= "), " < "),
    (re.compile(r" >= "), " > "),
    (re.compile(r" == "), " != "),
    (re.compile(r" && "), " || "),
    (re.compile(r" \|\| "), " && "),
    (re.compile(r" \+ "), " - "),
    (re.compile(r" - "), " + "),
    (re.compile(r" \+= "), " = "),
    (re.compile(r"(?<=[=(,] )0(?=[;,)])"), "1"),
    (re.compile(r"(?<=[=(,] )1(?=[;,)])"), "2"),
)
"""Patterns in C++ lines and what replaces them."""


class Mutant(NamedTuple):
    """One replaced piece of a file."""

    path: str
    line: int
    """Number of the first changed line, from 1."""
    scope: str
    """The function, with its class, or the C++ line's neighbourhood."""
    before: str
    """The changed lines."""
    after: str


def python_mutants(path: Path, name: str) -> Iterator[Mutant]:
    """Yield every mutant of the function bodies of a Python file; `name`: its path in reports."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    for scope, node, replacement in _replacements(ast.parse(source)):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        # Columns of the syntax tree count bytes.
        head = lines[first].encode()[: node.col_offset].decode()
        tail = lines[last].encode()[node.end_col_offset :].decode()
        before = "\n".join(lines[first : last + 1])
        after = f"{head}{replacement}{tail}"
        if before.split() != after.split():
            yield Mutant(name, first + 1, scope, before, after)


def _replacements(tree: ast.Module) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """Yield the function, the node and the new text of each mutant."""
    pending: list[tuple[str, ast.AST, bool]] = [("", tree, False)]
    while pending:
        scope, node, in_function = pending.pop()
        if in_function and isinstance(node, ast.expr | ast.stmt):
            yield from ((scope, node, text) for text in _texts(node))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                pending.append((f"{scope}{child.name}.", child, False))
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                pending += [(scope + child.name, part, True) for part in child.body]
            elif not isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments):
                is_annotation = isinstance(node, ast.AnnAssign) and child is node.annotation
                is_decorator = hasattr(node, "decorator_list") and child in node.decorator_list
                if not is_annotation and not is_decorator and not _is_silent(child):
                    pending.append((scope, child, in_function))


def _is_silent(node: ast.AST) -> bool:
    """Return True for a statement that calls a logger or the like, or a docstring."""
    if not isinstance(node, ast.Expr):
        return False
    value = node.value.value if isinstance(node.value, ast.Await) else node.value
    if isinstance(value, ast.Call):
        return bool(SILENT.search(ast.unparse(value.func)))
    return isinstance(value, ast.Constant)


def _texts(node: ast.expr | ast.stmt) -> Iterator[str]:
    """Yield the texts that may stand in the place of a node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield f"{left} {COMPARISONS[type(node.ops[0])]} {right}"
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        if not any(isinstance(side, ast.JoinedStr) for side in (node.left, node.right)):
            yield f"({_side(node.left)} {ARITHMETIC[type(node.op)]} {_side(node.right)})"
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield "(" + word.join(f"({ast.unparse(value)})" for value in node.values) + ")"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield str(node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
        arguments = [ast.unparse(part) for part in (*node.args, *node.keywords)]
        yield f"{CALLS[node.func.id]}({', '.join(arguments)})"
    elif isinstance(node, ast.IfExp):
        test = f"not ({ast.unparse(node.test)})"
        yield f"({ast.unparse(node.body)} if {test} else {ast.unparse(node.orelse)})"
    elif isinstance(node, ast.AugAssign | ast.Delete) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
    ):
        yield "pass"


def _side(node: ast.expr) -> str:
    """Return the source of an operand."""
    return f"({ast.unparse(node)})" if isinstance(node, ast.BinOp) else ast.unparse(node)


def cpp_mutants(path: Path, name: str) -> Iterator[Mutant]:
    """Yield every mutant of a C++ file, without what only newer CPUs compile."""
    conditions: list[bool] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("#if"):
            conditions.append("512" in stripped or "AMX" in stripped.upper())
        elif stripped.startswith("#endif"):
            conditions.pop()
        if any(conditions) or stripped.startswith(("#", "//", "*", "template", "static_assert")):
            continue
        code = line.split("//")[0]
        for pattern, text in CPP:
            for found in pattern.finditer(code):
                after = line[: found.start()] + text + line[found.end() :]
                yield Mutant(name, number, f"{path.stem}:{number // 40}", line, after)
