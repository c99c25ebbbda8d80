"""Tools and the choice among them: what is taken, as what, and what is refused by name."""

from typing import Any

import pytest

from gllm.options.field_types import FieldError
from gllm.options.limits import MAX_TOOL_DEPTH, MAX_TOOLS
from gllm.text.chat.tools import ToolOptions, parse_functions, parse_tools


def tool(name="f", **more):
    return {"type": "function", "function": {"name": name, **more}}


def custom(name="f", **more):
    return {"type": "custom", "custom": {"name": name, **more}}


def grammar(syntax, definition):
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


def allowed(mode, *tools):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
GOOD = [tool("f", parameters=SCHEMA), tool("g-2_X")]


def test_what_models_are_trained_on():
    given = [
        {
            "function": {
                "strict": True,
                "parameters": SCHEMA,
                "description": "d",
                "name": "f",
                "x": 1,
            },
            "type": "function",
        },
        tool("g", description=None, parameters=None),
    ]
    use = parse_tools(given, None)
    assert list(use.tools[0]) == ["type", "function"]
    assert list(use.tools[0]["function"]) == ["name", "description", "parameters"]
    assert use.tools[1] == tool("g")
    assert (use.choice, use.required_tool) == ("auto", "")
    assert use.schemas == {"f": SCHEMA, "g": {"type": "object", "properties": {}}}


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        (None, ("auto", "")),
        ("auto", ("auto", "")),
        ("required", ("required", "")),
        (NAMED, ("required", "f")),
    ],
    ids=str,
)
def test_choices(choice, found):
    use = parse_tools(GOOD, choice)
    assert (use.choice, use.required_tool) == found


def test_no_tools():
    absent: list[Any] = [None, []]
    for tools in absent:
        for choice in (None, "none", "auto"):
            assert parse_tools(tools, choice) == ToolOptions()
    assert parse_tools(GOOD, "none") == ToolOptions()


def nested(levels):
    """A schema of lists of lists of .."""
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"items": value}
    return {"properties": {"a": value}}


def test_depth():
    assert parse_tools([tool(parameters=nested(MAX_TOOL_DEPTH - 3))], None).choice == "auto"


BAD_TOOLS = [
    7,
    "x",
    {},
    ["x"],
    [None],
    [{}],
    [[]],
    [{"type": "function"}],
    [{"type": "function", "function": "f"}],
    [{"type": "web_search"}],
    [tool(7)],
    [tool("")],
    [tool("a b")],
    [tool("a" * 65)],
    [tool("é")],
    [tool("a\n")],
    [tool(strict=7)],
    [custom("a b")],
    [custom(format="text")],
    [custom(format={"type": "x"})],
    [custom(format={"type": "grammar"})],
    [custom(format=grammar("lark", 'start: "a"'))],
    [custom(format=grammar("regex", ""))],
    [custom(), tool()],
    [{"type": "custom"}],
    [tool(description=7)],
    [tool(parameters=7)],
    [tool(parameters=[])],
    [tool(parameters={"type": "string"})],
    [tool(parameters={"properties": []})],
    [tool(parameters={"properties": {"a": 7}})],
    [tool("f"), tool("f")],
    [tool(parameters={"required": True})],
    [tool(parameters={"required": [7]})],
    [tool(f"f{i}") for i in range(MAX_TOOLS + 1)],
    [tool(parameters=nested(MAX_TOOL_DEPTH + 1))],
]


@pytest.mark.parametrize("tools", BAD_TOOLS, ids=range(len(BAD_TOOLS)))
@pytest.mark.parametrize("choice", [None, "none", "required"])
def test_bad_tools(tools, choice):
    with pytest.raises(FieldError) as caught:
        parse_tools(tools, choice)
    assert caught.value.param == "tools"


BAD_CHOICES = [
    7,
    "x",
    "",
    True,
    [],
    {},
    {"type": "function"},
    {"type": "function", "function": {}},
    {"type": "function", "function": {"name": 7}},
    {"type": "function", "function": "f"},
    custom("f"),
    allowed("auto"),
    allowed("none", tool("f")),
    allowed("auto", tool("h")),
    allowed("auto", custom("f")),
    allowed("auto", "f"),
    {"type": "allowed_tools"},
    {"type": "x", "function": {"name": "f"}},
    {"type": "function", "function": {"name": "h"}},
]


@pytest.mark.parametrize("choice", BAD_CHOICES, ids=str)
@pytest.mark.parametrize("tools", [None, GOOD], ids=["none", "some"])
def test_bad_choices(tools, choice):
    with pytest.raises(FieldError) as caught:
        parse_tools(tools, choice)
    assert caught.value.param == "tool_choice"


def test_allowed_tools_are_as_if_there_were_no_others():
    for mode in ("auto", "required"):
        use = parse_tools([*GOOD, custom("c")], allowed(mode, custom("c"), tool("f")))
        assert [one["function"]["name"] for one in use.tools] == ["f", "c"]
        assert (use.choice, use.required_tool, use.only_listed_tools) == (mode, "", True)
    assert not parse_tools(GOOD, "auto").only_listed_tools


def test_a_custom_tool_is_a_function_of_one_string():
    use = parse_tools([custom("c", description="d", format=grammar("regex", "a|b"))], custom("c"))
    (made,) = use.tools
    assert made["type"] == "function"
    assert list(made["function"]) == ["name", "description", "parameters"]
    assert use.schemas["c"]["properties"] == {"input": {"type": "string", "pattern": "^(?:a|b)$"}}
    assert use.required_tool == "c"
    assert use.custom_tools == {"c"}
    assert parse_tools([custom("c", format={"type": "text"})], None).schemas["c"]["required"]


def test_strict_functions_are_known_by_name():
    use = parse_tools([tool("f", strict=True), tool("g", strict=False), tool("h")], None)
    assert use.strict_functions == {"f"}
    regex = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}
    custom = {"type": "custom", "custom": {"name": "c", "format": regex}}
    assert parse_tools([custom], None).strict_functions == {"c"}


@pytest.mark.parametrize(
    ("definition", "pattern"),
    [("a+", "^(?:a+)$"), ("^a+$", "^(?:a+)$"), (r"^(a|$)|b\$", r"^(?:(a|$)|b\$)$")],
)
def test_the_input_of_a_custom_tool_matches_as_a_whole(definition, pattern):
    regex = {"type": "grammar", "grammar": {"syntax": "regex", "definition": definition}}
    use = parse_tools([{"type": "custom", "custom": {"name": "c", "format": regex}}], None)
    assert use.schemas["c"]["properties"]["input"]["pattern"] == pattern


def test_the_older_functions():
    functions = [{"name": "f", "parameters": SCHEMA}, {"name": "g"}]
    assert parse_functions(functions, "none") == parse_functions(None, None) == ToolOptions()
    for call, found in (
        (None, ("auto", "")),
        ("auto", ("auto", "")),
        ({"name": "g"}, ("required", "g")),
    ):
        use = parse_functions(functions, call)
        assert (use.choice, use.required_tool, use.is_single_call) == (*found, True)
        assert use.schemas["f"] == SCHEMA
    for bad in ("required", 7, {}, {"name": 7}, {"name": "h"}):
        with pytest.raises(FieldError) as caught:
            parse_functions(functions, bad)
        assert caught.value.param == "function_call"
    several: list[Any] = [7, ["f"], [{"name": "a b"}], [functions[0]] * 2]
    for listed in several:
        with pytest.raises(FieldError) as caught:
            parse_functions(listed, "auto")
        assert caught.value.param == "functions"
