"""The tools of a chat and the choice among them: checks, and one form for functions, custom tools
and the older `functions`.

Templates and tool-call parsers see functions alone. A custom tool, whose input is free text, is a
function with one string argument (`INPUT`); `gllm.text.output.custom_input` turns its arguments
back into text.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from gllm.config.field_types import FieldError
from gllm.config.limits import MAX_TOOL_BYTES, MAX_TOOL_DEPTH, MAX_TOOLS, check_size

MAX_PATTERN = 8192
"""Characters of a custom tool's regular expression."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
TOOL_CHOICE_MODES = ("none", "auto", "required")
TOOL_TYPES = ("function", "custom")
CUSTOM_INPUT_KEY = "input"
"""The argument that holds a custom tool's input."""

Tool = dict[str, Any]
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""The schema of a tool without parameters."""


@dataclass(frozen=True)
class ToolOptions:
    """The tools of a request, as templates expect them, and the choice among them."""

    tools: tuple[Tool, ...] = ()
    choice: str = "none"
    """none, auto or required."""
    named: str = ""
    """The tool that has to be called, with `required`; empty: any."""
    strict: frozenset[str] = frozenset()
    """Names of the functions whose schema is strict."""
    custom: frozenset[str] = frozenset()
    """Names of the custom tools."""
    is_restricted: bool = False
    """Whether tools that are not here must not be called, although the model may know of them."""
    is_single: bool = False
    """Whether an answer has one call at most."""

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """Schemas of arguments by name of the tool."""
        functions = (tool["function"] for tool in self.tools)
        return {one["name"]: one.get("parameters", NO_ARGUMENTS) for one in functions}


def parse_tools(tools: object, choice: object) -> ToolOptions:
    """Check `tools` and `tool_choice`. Raises FieldError naming one of them.

    With the choice `none` it is as if there were no tools; with `allowed_tools` as if there were no
    others.
    """
    checked = _checked_tools(tools, "tools")
    if not checked:
        if choice not in (None, "none", "auto"):
            raise FieldError("tool_choice", "tool_choice asks for a call, but there are no tools")
        return ToolOptions()
    kinds = {tool["function"]["name"]: kind for tool, kind, _ in checked}
    mode, named, allowed = _choice(choice, kinds)
    if mode == "none":
        return ToolOptions()
    kept = [row for row in checked if not allowed or row[0]["function"]["name"] in allowed]
    return ToolOptions(
        tools=tuple(tool for tool, _, _ in kept),
        choice=mode,
        named=named,
        strict=frozenset(tool["function"]["name"] for tool, _, strict in kept if strict),
        custom=frozenset(name for name, kind in kinds.items() if kind == "custom"),
        is_restricted=bool(allowed),
    )


def parse_functions(functions: object, call: object) -> ToolOptions:
    """Check the older `functions` and `function_call`. Raises FieldError naming one of them."""
    if functions is not None and not isinstance(functions, list):
        raise FieldError("functions", f"functions has to be a list of up to {MAX_TOOLS}")
    wrapped = [{"type": "function", "function": function} for function in functions or ()]
    checked = _checked_tools(wrapped, "functions")
    tools = tuple(tool for tool, _, _ in checked)
    if call == "none" or (not tools and call in (None, "auto")):
        return ToolOptions()
    if not tools:
        raise FieldError("function_call", "function_call asks for a call without functions")
    if call in (None, "auto"):
        return ToolOptions(tools, "auto", is_single=True)
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        raise FieldError(
            "function_call", "function_call has to be none, auto or an object with a name"
        )
    use = ToolOptions(tools, "required", name, is_single=True)
    if name not in use.schemas:
        raise FieldError("function_call", f"function_call names {name!r}, which is no function")
    return use


def _choice(choice: object, kinds: Mapping[str, str]) -> tuple[str, str, set[str]]:
    """Return the mode of a choice, the name of the tool that has to be called, and the names of
    those that may be; empty for any. `kinds`: function or custom, by name of the tool."""
    if choice is None:
        return "auto", "", set()
    if isinstance(choice, str) and choice in TOOL_CHOICE_MODES:
        return choice, "", set()
    if isinstance(choice, dict) and choice.get("type") in TOOL_TYPES:
        return "required", _reference(choice, kinds, "tool_choice"), set()
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools"), kinds)
    raise FieldError(
        "tool_choice",
        f"tool_choice must be {', '.join(TOOL_CHOICE_MODES)}, an object of type function or custom "
        "with its name, or an object of type allowed_tools",
    )


def _allowed(allowed: object, kinds: Mapping[str, str]) -> tuple[str, str, set[str]]:
    """Read the object `allowed_tools`."""
    given = allowed if isinstance(allowed, dict) else {}
    mode, tools = given.get("mode"), given.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise FieldError(
            "tool_choice",
            "tool_choice.allowed_tools has to have a mode, auto or required, and a list of tools",
        )
    where = "tool_choice.allowed_tools.tools"
    return mode, "", {_reference(one, kinds, f"{where}[{i}]") for i, one in enumerate(tools)}


def _reference(value: object, kinds: Mapping[str, str], where: str) -> str:
    """Return the name of the tool that an object refers to."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in TOOL_TYPES:
        raise FieldError(
            "tool_choice", f"{where} has to be an object of type {' or '.join(TOOL_TYPES)}"
        )
    body = value.get(kind)
    name = body.get("name") if isinstance(body, dict) else None
    if not isinstance(name, str):
        raise FieldError("tool_choice", f"{where} has to have a {kind} with its name")
    if kinds.get(name) != kind:
        raise FieldError("tool_choice", f"{where} names {name!r}, which is none of tools")
    return name


def _checked_tools(tools: object, param: str) -> list[tuple[Tool, str, bool]]:
    """Return copies of tools with what models are trained on, in the order they are trained on,
    each with its kind and whether its schema is strict."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise FieldError(param, f"{param} has to be a list of up to {MAX_TOOLS}")
    check_size(param, tools, MAX_TOOLS, "tools")
    check_size(param, msgspec.json.encode(tools), MAX_TOOL_BYTES, "bytes of JSON")
    made = [_checked(param, f"{param}[{i}]", tool) for i, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool, _, _ in made]
    for name in names:
        if names.count(name) > 1:
            raise FieldError(param, f"{param} has two of the name {name!r}")
    return made


def _checked(param: str, where: str, tool: object) -> tuple[Tool, str, bool]:
    def refuse(why: str) -> NoReturn:
        raise FieldError(param, f"{where} {why}")

    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or kind not in TOOL_TYPES:
        refuse(f"has to be an object of type {' or '.join(TOOL_TYPES)}")
    body = tool.get(kind)
    if not isinstance(body, dict):
        refuse(f"has to have a {kind}, which is an object")
    name = body.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        refuse(f"has to have a {kind} with a name of 1 to 64 letters, digits, _ and -")
    description = body.get("description")
    if description is not None and not isinstance(description, str):
        refuse("has a description that is no string")
    strict = body.get("strict")
    if strict is not None and not isinstance(strict, bool):
        refuse("has a strict that is neither true nor false")
    if kind == "custom":
        parameters: object = _input_schema(body.get("format"), refuse)
    else:
        parameters = body.get("parameters")
    if parameters is not None and not _is_object_schema(parameters):
        refuse("has parameters that are no JSON schema of an object")
    given = {"name": name, "description": description, "parameters": parameters}
    kept = {key: value for key, value in given.items() if value is not None}
    return {"type": "function", "function": kept}, kind, bool(strict)


def _input_schema(form: object, refuse: Callable[[str], NoReturn]) -> Tool:
    """Return the schema of the arguments that stand for a custom tool's input."""
    text: Tool = {"type": "string"}
    if form is None or (isinstance(form, dict) and form.get("type") == "text"):
        return _object_of(text)
    grammar = form.get("grammar") if isinstance(form, dict) else None
    if not isinstance(form, dict) or form.get("type") != "grammar" or not isinstance(grammar, dict):
        refuse("has a format that is neither of type text nor of type grammar with a grammar")
    if grammar.get("syntax") != "regex":
        refuse("has a grammar whose syntax is not supported: only regex")
    pattern = grammar.get("definition")
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN:
        refuse(f"has a grammar without a definition of 1 to {MAX_PATTERN} characters")
    return _object_of({**text, "pattern": f"^(?:{pattern})$"})


def _object_of(text: Tool) -> Tool:
    return {
        "type": "object",
        "properties": {CUSTOM_INPUT_KEY: text},
        "required": [CUSTOM_INPUT_KEY],
    }


def _is_object_schema(schema: object) -> bool:
    """Whether a schema describes objects, as far as that is to be seen from its outside."""
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        return False
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    listed = all(isinstance(value, dict | bool) for value in properties.values())
    return listed and all(isinstance(name, str) for name in required) and not _is_deep(schema)


def _is_deep(value: object) -> bool:
    """Whether values are nested deeper than `MAX_TOOL_DEPTH`."""
    inside = [value]
    for _ in range(MAX_TOOL_DEPTH):
        lists = [one for one in inside if isinstance(one, list)]
        objects = [one.values() for one in inside if isinstance(one, dict)]
        inside = [nested for several in (*lists, *objects) for nested in several]
    return bool(inside)
