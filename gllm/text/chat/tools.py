"""The tools of a chat request and the choice among them: validation and one common form.

Chat templates and tool call parsers see functions alone. A custom tool, whose input is free text,
is a function with one string argument (`CUSTOM_INPUT_KEY`); `gllm.text.output.parser`
converts its arguments back into text. The deprecated `functions` become tools as well.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import msgspec

from gllm.options.field_types import FieldError
from gllm.options.limits import MAX_TOOL_BYTES, MAX_TOOL_DEPTH, MAX_TOOLS, check_size
from gllm.text.grammar.sources.patterns import split_alternatives, strip_anchors

MAX_PATTERN_CHARACTERS = 8192
"""Length limit of a custom tool's regular expression."""
TOOL_CHOICE_MODES = ("none", "auto", "required")
"""Values of `tool_choice` that are strings."""
TOOL_TYPES = ("function", "custom")
CUSTOM_INPUT_KEY = "input"
"""Name of the argument that holds a custom tool's input."""
MAX_NAME_CHARACTERS = 64
"""Length limit of a tool's name."""
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_CHARACTERS}}}")

Tool = dict[str, Any]
"""An entry of `tools` in the form that chat templates expect."""
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""The schema of a tool without parameters."""


@dataclass(frozen=True)
class ToolOptions:
    """Tools and tool choice of a chat request, with the tools as chat templates expect them."""

    tools: tuple[Tool, ...] = ()
    choice: str = "none"
    """Tool choice: none, auto or required."""
    required_tool: str = ""
    """Name of the only tool that may be called, with `required`; empty for any tool."""
    strict_functions: frozenset[str] = frozenset()
    """Names of the functions whose schema is strict."""
    custom_tools: frozenset[str] = frozenset()
    """Names of the custom tools."""
    only_listed_tools: bool = False
    """True if calls of tools that are not in `tools` are content, because the request lists the
    allowed tools."""
    is_single_call: bool = False
    """True if an answer may contain at most one call."""

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """JSON Schemas of arguments by name of the tool."""
        functions = [tool["function"] for tool in self.tools]
        return {
            function["name"]: function.get("parameters", NO_ARGUMENTS) for function in functions
        }


class _CheckedTool(NamedTuple):
    """A valid tool."""

    name: str
    tool: Tool
    type: str
    """function or custom."""
    is_strict: bool


def parse_tools(tools: object, choice: object) -> ToolOptions:
    """Validate the request fields `tools` and `tool_choice`.

    The result has no tools with the choice `none`, and only the allowed ones with `allowed_tools`.

    Raises:
        FieldError: One of the two is invalid; the error names it.
    """
    checked = [] if tools is None else _check_tools(tools, "tools")
    if not checked:
        if choice not in (None, "none", "auto"):
            raise FieldError(
                "tool_choice", "tool_choice requires a tool call, but there are no tools"
            )
        return ToolOptions()
    types = {tool.name: tool.type for tool in checked}
    mode, required_tool, allowed = _parse_choice(choice, types)
    if mode == "none":
        return ToolOptions()
    kept = [tool for tool in checked if not allowed or tool.name in allowed]
    return ToolOptions(
        tools=tuple(tool.tool for tool in kept),
        choice=mode,
        required_tool=required_tool,
        strict_functions=frozenset(tool.name for tool in kept if tool.is_strict),
        custom_tools=frozenset(name for name, kind in types.items() if kind == "custom"),
        only_listed_tools=bool(allowed),
    )


def parse_functions(functions: object, call: object) -> ToolOptions:
    """Validate the deprecated `functions` and `function_call` and convert them to tools.

    Raises:
        FieldError: One of the two is invalid; the error names it.
    """
    if functions is not None and not isinstance(functions, list):
        raise FieldError("functions", f"functions must be a list of at most {MAX_TOOLS}")
    wrapped = [{"type": "function", "function": function} for function in functions or ()]
    tools = tuple(check_tool.tool for check_tool in _check_tools(wrapped, "functions"))
    if call == "none" or (not tools and call in (None, "auto")):
        return ToolOptions()
    if not tools:
        raise FieldError(
            "function_call", "function_call requires a call, but there are no functions"
        )
    if call in (None, "auto"):
        return ToolOptions(tools, "auto", is_single_call=True)
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        raise FieldError(
            "function_call", "function_call must be none, auto or an object with a name"
        )
    options = ToolOptions(tools, "required", name, is_single_call=True)
    if name not in options.schemas:
        raise FieldError(
            "function_call", f"function_call names {name!r}, which is not in functions"
        )
    return options


def _parse_choice(choice: object, types: Mapping[str, str]) -> tuple[str, str, set[str]]:
    """Return the mode of a choice, the required tool and the allowed tools; empty for any.

    Args:
        choice: Value of `tool_choice`.
        types: function or custom, by name of the tool.
    """
    if choice is None:
        return "auto", "", set()
    if isinstance(choice, str) and choice in TOOL_CHOICE_MODES:
        return choice, "", set()
    if isinstance(choice, dict) and choice.get("type") in TOOL_TYPES:
        return "required", _referenced_name(choice, types, "tool_choice"), set()
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _parse_allowed_tools(choice.get("allowed_tools"), types)
    raise FieldError(
        "tool_choice",
        f"tool_choice must be {', '.join(TOOL_CHOICE_MODES)}, an object of type function or custom "
        "with its name, or an object of type allowed_tools",
    )


def _parse_allowed_tools(allowed: object, types: Mapping[str, str]) -> tuple[str, str, set[str]]:
    """Return what `_parse_choice` returns for the object `allowed_tools`."""
    fields = allowed if isinstance(allowed, dict) else {}
    mode, tools = fields.get("mode"), fields.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise FieldError(
            "tool_choice",
            "tool_choice.allowed_tools must have a mode, auto or required, and a list of tools",
        )
    path = "tool_choice.allowed_tools.tools"
    names = {_referenced_name(tool, types, f"{path}[{i}]") for i, tool in enumerate(tools)}
    return mode, "", names


def _referenced_name(reference: object, types: Mapping[str, str], path: str) -> str:
    """Return the name of the tool that an object refers to. Raises FieldError."""
    kind = reference.get("type") if isinstance(reference, dict) else None
    if not isinstance(reference, dict) or kind not in TOOL_TYPES:
        raise FieldError(
            "tool_choice", f"{path} must be an object of type {' or '.join(TOOL_TYPES)}"
        )
    body = reference.get(kind)
    name = body.get("name") if isinstance(body, dict) else None
    if not isinstance(name, str):
        raise FieldError("tool_choice", f"{path} must have a {kind} with its name")
    if types.get(name) != kind:
        raise FieldError("tool_choice", f"{path} names {name!r}, which is not in tools")
    return name


def _check_tools(tools: object, param: str) -> list[_CheckedTool]:
    """Return copies of tools with the keys that models are trained on, in that order."""
    if not isinstance(tools, list):
        raise FieldError(param, f"{param} must be a list of at most {MAX_TOOLS}")
    check_size(param, tools, MAX_TOOLS, "tools")
    check_size(param, msgspec.json.encode(tools), MAX_TOOL_BYTES, "bytes of JSON")
    checked = [_check_tool(param, f"{param}[{i}]", tool) for i, tool in enumerate(tools)]
    names = [tool.name for tool in checked]
    for name in names:
        if names.count(name) > 1:
            raise FieldError(param, f"{param} has two tools of the name {name!r}")
    return checked


def _check_tool(param: str, path: str, tool: object) -> _CheckedTool:
    """Return a copy of one tool. Raises FieldError."""

    def fail(problem: str) -> NoReturn:
        raise FieldError(param, f"{path} {problem}")

    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or kind not in TOOL_TYPES:
        fail(f"must be an object of type {' or '.join(TOOL_TYPES)}")
    body = tool.get(kind)
    if not isinstance(body, dict):
        fail(f"must have a {kind}, which is an object")
    name = body.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        length = f"1 to {MAX_NAME_CHARACTERS}"
        fail(f"must have a {kind} with a name of {length} letters, digits, _ and -")
    description = body.get("description")
    if description is not None and not isinstance(description, str):
        fail("has a description that is not a string")
    strict = body.get("strict")
    if strict is not None and not isinstance(strict, bool):
        fail("has a strict that is neither true nor false")
    if kind == "custom":
        parameters: object = _custom_tool_schema(body.get("format"), fail)
    else:
        parameters = body.get("parameters")
    if parameters is not None and not _is_object_schema(parameters):
        fail("has parameters that are not a JSON Schema of an object")
    fields = {"name": name, "description": description, "parameters": parameters}
    function = {key: value for key, value in fields.items() if value is not None}
    # The schema of a custom tool is the grammar of its input, which has to be enforced.
    is_strict = bool(strict) or kind == "custom"
    return _CheckedTool(name, {"type": "function", "function": function}, kind, is_strict)


def _custom_tool_schema(input_format: object, fail: Callable[[str], NoReturn]) -> Tool:
    """Return the schema of the arguments that stand for a custom tool's input."""
    text: Tool = {"type": "string"}
    fields = input_format if isinstance(input_format, dict) else {}
    if input_format is None or fields.get("type") == "text":
        return _input_object(text)
    grammar = fields.get("grammar")
    if fields.get("type") != "grammar" or not isinstance(grammar, dict):
        fail("has a format that is neither of type text nor of type grammar with a grammar")
    if grammar.get("syntax") != "regex":
        fail("has a grammar whose syntax is not supported: use regex")
    pattern = grammar.get("definition")
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN_CHARACTERS:
        fail(f"must have a grammar with a definition of 1 to {MAX_PATTERN_CHARACTERS} characters")
    # The whole input matches in any case, and the grammar compiler has no anchors within a group.
    core = "|".join(map(strip_anchors, split_alternatives(pattern)))
    return _input_object({**text, "pattern": f"^(?:{core})$"})


def _input_object(text_schema: Tool) -> Tool:
    """Return the schema of an object whose only property is the input."""
    return {
        "type": "object",
        "properties": {CUSTOM_INPUT_KEY: text_schema},
        "required": [CUSTOM_INPUT_KEY],
    }


def _is_object_schema(schema: object) -> bool:
    """Return whether a schema describes objects, as far as its outermost level shows."""
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        return False
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    are_schemas = all(isinstance(value, dict | bool) for value in properties.values())
    return are_schemas and all(isinstance(name, str) for name in required) and not _is_deep(schema)


def _is_deep(value: object) -> bool:
    """Return whether values are nested deeper than `MAX_TOOL_DEPTH`."""
    level = [value]
    for _ in range(MAX_TOOL_DEPTH):
        lists = [value for value in level if isinstance(value, list)]
        objects = [value.values() for value in level if isinstance(value, dict)]
        level = [nested for values in (*lists, *objects) for nested in values]
    return bool(level)
