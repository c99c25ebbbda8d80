"""Decide from the source of a chat template if it loops over the parts of a message's content."""

from collections.abc import Iterator

from jinja2 import nodes

KEY = "content"
"""Key of a message with its text or its parts."""


def loops_over_content(template: nodes.Template) -> bool:
    """Return True if a template has a loop over the content of a message.

    Follows the content through variables, filters, slices and arguments of macros, but not through
    calls: the pieces of a text that `split` returns are no parts.
    """
    macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
    names: set[str] = set()
    num_known = -1
    while num_known < len(names):
        num_known = len(names)
        names |= {name for name, value in _bindings(template, macros) if _is_content(value, names)}
    return any(_is_content(loop.iter, names) for loop in template.find_all(nodes.For))


def _bindings(
    template: nodes.Template, macros: dict[str, nodes.Macro]
) -> Iterator[tuple[str, nodes.Node]]:
    """Yield the names of variables and of arguments of macros, with what they are set to."""
    for assignment in template.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name):
            yield assignment.target.name, assignment.node
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            macro = macros[call.node.name]
            for argument, value in zip(macro.args, call.args, strict=False):
                yield argument.name, value
            for keyword in call.kwargs:
                yield keyword.key, keyword.value


def _is_content(value: nodes.Node | None, names: set[str]) -> bool:
    """Return True if an expression may be a message's content; `names` are variables that may."""
    match value:
        case nodes.Name():
            return value.name in names
        case nodes.Getattr():
            return value.attr == KEY
        case nodes.Getitem(arg=nodes.Const(value=key)):
            return bool(key == KEY)
        case nodes.Getitem() | nodes.Filter():
            return _is_content(value.node, names)
        case nodes.CondExpr():
            return _is_content(value.expr1, names) or _is_content(value.expr2, names)
        case nodes.Or() | nodes.And():
            return _is_content(value.left, names) or _is_content(value.right, names)
        case nodes.Call(node=nodes.Getattr(attr="get")):
            return bool(value.args) and value.args[0] == nodes.Const(KEY)
        case _:
            return False
