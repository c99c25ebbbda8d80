"""Chat templates of this project have only what other template engines read as well.

llama.cpp's parser and minijinja know a part of Jinja: they lack tuples, methods of Python's objects
and slices with steps, or read them otherwise.
"""

import json

import jinja2
import pytest
from jinja2 import nodes

from gllm.models.hub import DEMO
from scripts import convert_chatglm_tokenizer, convert_qwen_tokenizer
from scripts.demo_model import chat

FILTERS = {"default", "join", "length", "lower", "replace", "tojson", "trim", "upper"}
TESTS = {"defined", "eq", "mapping", "none", "string"}
STATEMENTS = (nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign)
EXPRESSIONS = (
    nodes.Name, nodes.Const, nodes.Getitem, nodes.Getattr, nodes.CondExpr, nodes.Compare,
    nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Add, nodes.Concat, nodes.Filter,
    nodes.Test, nodes.Call,
)  # fmt: skip
TEMPLATES = {
    "demo": json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"],
    "demo, trained": chat.CHAT_TEMPLATE,
    "Qwen": convert_qwen_tokenizer.CHAT_TEMPLATE,
    "ChatGLM": convert_chatglm_tokenizer.CHAT_TEMPLATE,
}


def find_unportable(source: str) -> list[str]:
    """Return the parts of a template that other engines may not read."""
    tree = jinja2.Environment().parse(source)
    found = []
    for node in [tree, *tree.find_all(nodes.Node)]:
        name = type(node).__name__
        if isinstance(node, nodes.Filter) and node.name not in FILTERS:
            found.append(f"filter {node.name}")
        elif isinstance(node, nodes.Test) and node.name not in TESTS:
            found.append(f"test {node.name}")
        elif isinstance(node, nodes.Call):
            callee = node.node
            if not (isinstance(callee, nodes.Name) and callee.name == "raise_exception"):
                found.append(f"call of {getattr(callee, 'attr', getattr(callee, 'name', name))}")
        elif isinstance(node, nodes.CondExpr) and node.expr2 is None:
            found.append("if without else in an expression")
        elif not isinstance(node, STATEMENTS + EXPRESSIONS):
            found.append(name)
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_read_by_other_engines(name: str) -> None:
    assert find_unportable(TEMPLATES[name]) == []


def test_the_shipped_template_is_that_of_the_script() -> None:
    assert TEMPLATES["demo"] == chat.CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("{% for m in messages[::-1] %}{% endfor %}", "Slice"),
        ("{% for m in messages.get('x') or () %}{% endfor %}", "Tuple"),
        ("{{ m.get('x') }}", "call of get"),
        ("{{ m.content.strip() }}", "call of strip"),
        ("{{ '\n' if m }}", "if without else in an expression"),
        ("{{ m | pprint }}", "filter pprint"),
        ("{% if m is divisibleby 3 %}{% endif %}", "test divisibleby"),
        ("{% macro f() %}{% endmacro %}", "Macro"),
    ],
)
def test_unportable_parts_are_found(source: str, part: str) -> None:
    assert part in find_unportable(source)
