"""Input items, tools and formats of OpenAI's Responses API as chat completions have them."""

import base64
import binascii
import json
from typing import Any

from gllm.config.field_types import FieldError
from gllm.frontend.fields.chat_messages import Turns, listed, refuse, string, text_of, unknown_type
from gllm.text.chat.tools import CUSTOM_INPUT_KEY, TOOL_TYPES

Json = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")
TEXTS = ("input_text", "output_text", "text")
CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")
ITEMS = ("message", *CALLS, *OUTPUTS, "reasoning", "compaction")
COMPACTED = "gllm-summary:"
"""Marks the contents of compaction items that this server wrote."""
CHOICES = (*TOOL_TYPES, "allowed_tools")


def convert_input(given: str | list[Json] | None, instructions: str | None) -> list[Json]:
    """Return the input as chat messages, behind the instructions. Raises FieldError."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not items or not given:
        raise FieldError("input", "input has to be a string or a list of items, not empty")
    # What a compacted conversation begins with are the user's messages in a row.
    turns = Turns(joins=any(item.get("type") == "compaction" for item in items))
    if instructions:
        turns.say("system", instructions)
    for i, item in enumerate(items):
        _add_item(turns, item, f"input[{i}]")
    if not turns.messages:
        raise FieldError("input", "input has nothing that is said")
    return turns.messages


def convert_format(given: Json | None) -> Json | None:
    """Return the text's form as chat completions nest it."""
    if given is None or given.get("type") != "json_schema":
        return given
    schema = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def convert_tool(tool: Json, where: str) -> Json:
    """Return a tool as chat completions nest it. Raises FieldError."""
    kind = tool.get("type")
    string(tool, "name", where)
    if kind == "function":
        names: tuple[str, ...] = ("name", "description", "parameters", "strict")
    elif kind == "custom":
        names = ("name", "description", "format")
    else:
        unknown_type(tool, where, TOOL_TYPES)
    body = {name: tool[name] for name in names if tool.get(name) is not None}
    form = body.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        grammar = {name: value for name, value in form.items() if name != "type"}
        body["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": kind, kind: body}


def convert_tool_choice(given: str | Json | None) -> str | Json | None:
    """Return the choice as chat completions nest it. Raises FieldError."""
    if not isinstance(given, dict):
        return given
    if given.get("type") != "allowed_tools":
        return _reference(given, "tool_choice", CHOICES)
    where = "tool_choice.tools"
    tools = [
        _reference(tool, f"{where}[{i}]", TOOL_TYPES)
        for i, tool in enumerate(listed(given.get("tools"), where))
    ]
    allowed = {"mode": given.get("mode"), "tools": tools}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _reference(tool: Json, where: str, known: tuple[str, ...]) -> Json:
    """Return the name of a tool as chat completions nest it."""
    kind = tool.get("type")
    if kind not in TOOL_TYPES:
        unknown_type(tool, where, known)
    return {"type": kind, kind: {"name": string(tool, "name", where)}}


def _add_item(turns: Turns, item: Json, where: str) -> None:
    """Add an item of the input as a turn, or as a part of one."""
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in ROLES:
                refuse(where, f"has to have a role of {', '.join(ROLES)}")
            text = text_of(item.get("content"), f"{where}.content", TEXTS)
            if role == "assistant":
                turns.answer(text)
            else:
                turns.say(role, text)
        case "function_call" | "custom_tool_call" as kind:
            call_id, name = (string(item, one, where) for one in ("call_id", "name"))
            if kind == "function_call":
                arguments = string(item, "arguments", where)
            else:
                arguments = json.dumps(
                    {CUSTOM_INPUT_KEY: string(item, "input", where)}, ensure_ascii=False
                )
            turns.call(call_id, name, arguments)
        case "function_call_output" | "custom_tool_call_output":
            text = text_of(item.get("output"), f"{where}.output", TEXTS)
            turns.result(string(item, "call_id", where), text)
        case "reasoning":
            parts = listed(item.get("content") or [], f"{where}.content")
            if parts:
                turns.think(text_of(parts, f"{where}.content", ("reasoning_text",)))
        case "compaction":
            turns.answer(_summary(string(item, "encrypted_content", where), where))
        case _:
            unknown_type(item, where, ITEMS)


def compacted(summary: str) -> str:
    """Return a summary as clients carry it: they are not to read it, but it is no secret."""
    return COMPACTED + base64.b64encode(summary.encode()).decode()


def _summary(content: str, where: str) -> str:
    """Return the summary that a compaction item carries."""
    try:
        if not content.startswith(COMPACTED):
            raise ValueError
        return base64.b64decode(content.removeprefix(COMPACTED), validate=True).decode()
    except (ValueError, binascii.Error):
        refuse(where, "has an encrypted_content that no server of this kind wrote")
