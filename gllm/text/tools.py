"""The tools a chat may use, and which of them the model has to call.

Owns the check of both. Knows nothing of templates and of how a model writes calls.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from gllm.config import FieldError
from gllm.limits import MAX_TOOL_BYTES, MAX_TOOL_DEPTH, MAX_TOOLS, check_size

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
CHOICES = ("none", "auto", "required")

Tool = dict[str, Any]
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""The schema of a tool without parameters."""


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, as templates expect them, and the choice among them."""

    tools: tuple[Tool, ...] = ()
    choice: str = "none"
    """none, auto or required."""
    named: str = ""
    """The tool that has to be called, with `required`; empty: any."""

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """Schemas of arguments by name of the tool."""
        functions = (tool["function"] for tool in self.tools)
        return {one["name"]: one.get("parameters", NO_ARGUMENTS) for one in functions}


def tool_use(tools: object, choice: object) -> ToolUse:
    """What `tools` and `tool_choice` ask for. Raises FieldError naming one of them.

    With the choice `none` it is as if there were no tools.
    """
    checked = _checked_tools(tools)
    if not checked:
        if choice not in (None, "none", "auto"):
            raise FieldError("tool_choice", "tool_choice asks for a call, but there are no tools")
        return ToolUse()
    use = ToolUse(checked, *_choice(choice))
    if use.named and use.named not in use.schemas:
        raise FieldError("tool_choice", f"tool_choice names {use.named!r}, which is none of tools")
    return ToolUse() if use.choice == "none" else use


def _choice(choice: object) -> tuple[str, str]:
    """A choice and the tool's name, where it has one."""
    if choice is None:
        return "auto", ""
    if isinstance(choice, str) and choice in CHOICES:
        return choice, ""
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and name:
            return "required", name
    raise FieldError(
        "tool_choice",
        f"tool_choice has to be {', '.join(CHOICES)} or an object of type function with its name",
    )


def _checked_tools(tools: object) -> tuple[Tool, ...]:
    """Copies of tools with what models are trained on, in the order they are trained on."""
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise FieldError("tools", f"tools has to be a list of up to {MAX_TOOLS}")
    check_size("tools", tools, MAX_TOOLS, "tools")
    check_size("tools", msgspec.json.encode(tools), MAX_TOOL_BYTES, "bytes of JSON")
    made = tuple(_checked(f"tools[{i}]", tool) for i, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in made]
    for name in names:
        if names.count(name) > 1:
            raise FieldError("tools", f"tools has two functions of the name {name!r}")
    return made


def _checked(where: str, tool: object) -> Tool:
    def refuse(why: str) -> NoReturn:
        raise FieldError("tools", f"{where} {why}")

    if not isinstance(tool, dict) or tool.get("type") != "function":
        refuse("has to be an object of type function")
    function = tool.get("function")
    if not isinstance(function, dict):
        refuse("has to have a function, which is an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        refuse("has to have a function with a name of 1 to 64 letters, digits, _ and -")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        refuse("has a description that is no string")
    parameters = function.get("parameters")
    if parameters is not None and not _is_object_schema(parameters):
        refuse("has parameters that are no JSON schema of an object")
    given = {"name": name, "description": description, "parameters": parameters}
    kept = {key: value for key, value in given.items() if value is not None}
    return {"type": "function", "function": kept}


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
