"""Convert input items, tools and formats of OpenAI's Responses API to those of chat completions."""

import base64
import binascii
import json

from gllm.frontend.fields.base import JsonObject
from gllm.frontend.fields.chat_messages import (
    ChatMessageBuilder,
    check_type,
    get_string,
    parse_object_list,
    parse_text,
)
from gllm.frontend.fields.value_errors import raise_field_error, raise_unsupported
from gllm.options.field_types import FieldError
from gllm.text.chat.tools import CUSTOM_INPUT_KEY, TOOL_TYPES

ROLES = ("user", "assistant", "system", "developer")
TEXT_PART_TYPES = ("input_text", "output_text", "text")
ITEM_TYPES = (
    "message",
    "function_call",
    "custom_tool_call",
    "function_call_output",
    "custom_tool_call_output",
    "reasoning",
    "compaction",
)
TOOL_CHOICE_TYPES = (*TOOL_TYPES, "allowed_tools")
SUMMARY_PREFIX = "gllm-summary:"
"""Start of `encrypted_content` of the compaction items that this server creates."""
FUNCTION_KEYS = ("name", "description", "parameters", "strict")
CUSTOM_TOOL_KEYS = ("name", "description", "format")


def convert_input(
    input_items: str | list[JsonObject] | None, instructions: str | None
) -> list[JsonObject]:
    """Return the chat messages of an input, after the instructions. Raises FieldError."""
    items = input_items
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not items or not input_items:
        raise FieldError("input", "input has to be a string or a list of items, and not empty")
    # A compacted conversation begins with consecutive user messages.
    has_summary = any(item.get("type") == "compaction" for item in items)
    builder = ChatMessageBuilder(merge_user_messages=has_summary)
    if instructions:
        builder.add_message("system", instructions)
    for index, item in enumerate(items):
        _add_item(builder, item, f"input[{index}]")
    if not builder.messages:
        raise FieldError("input", "input contains no messages, but at least one is required")
    return builder.messages


def convert_format(text_format: JsonObject | None) -> JsonObject | None:
    """Return `text.format` as `response_format`."""
    if text_format is None or text_format.get("type") != "json_schema":
        return text_format
    json_schema = {name: value for name, value in text_format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": json_schema}


def convert_tool(tool: JsonObject, path: str) -> JsonObject:
    """Return a tool in the form of chat completions. Raises FieldError."""
    check_type(tool, path, TOOL_TYPES)
    get_string(tool, "name", path)
    kind = tool["type"]
    keys = FUNCTION_KEYS if kind == "function" else CUSTOM_TOOL_KEYS
    body = {key: tool[key] for key in keys if tool.get(key) is not None}
    tool_format = body.get("format")
    if isinstance(tool_format, dict) and tool_format.get("type") == "grammar":
        grammar = {name: value for name, value in tool_format.items() if name != "type"}
        body["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": kind, kind: body}


def convert_tool_choice(tool_choice: str | JsonObject | None) -> str | JsonObject | None:
    """Return `tool_choice` in the form of chat completions. Raises FieldError."""
    if not isinstance(tool_choice, dict):
        return tool_choice
    check_type(tool_choice, "tool_choice", TOOL_CHOICE_TYPES)
    if tool_choice["type"] != "allowed_tools":
        return _convert_tool_name(tool_choice, "tool_choice")
    path = "tool_choice.tools"
    tools = [
        _convert_tool_name(tool, f"{path}[{index}]")
        for index, tool in enumerate(parse_object_list(tool_choice.get("tools"), path))
    ]
    allowed_tools = {"mode": tool_choice.get("mode"), "tools": tools}
    return {"type": "allowed_tools", "allowed_tools": allowed_tools}


def _convert_tool_name(tool: JsonObject, path: str) -> JsonObject:
    """Return a tool's type and name in the form of chat completions. Raises FieldError."""
    check_type(tool, path, TOOL_TYPES)
    kind = tool["type"]
    return {"type": kind, kind: {"name": get_string(tool, "name", path)}}


def _add_item(builder: ChatMessageBuilder, item: JsonObject, path: str) -> None:
    """Add an input item to the chat messages. Raises FieldError."""
    check_type({"type": "message", **item}, path, ITEM_TYPES)
    match item.get("type", "message"):
        case "message":
            _add_message(builder, item, path)
        case "function_call":
            call_id, name = get_string(item, "call_id", path), get_string(item, "name", path)
            builder.add_tool_call(call_id, name, get_string(item, "arguments", path))
        case "custom_tool_call":
            call_id, name = get_string(item, "call_id", path), get_string(item, "name", path)
            arguments = json.dumps(
                {CUSTOM_INPUT_KEY: get_string(item, "input", path)}, ensure_ascii=False
            )
            builder.add_tool_call(call_id, name, arguments)
        case "function_call_output" | "custom_tool_call_output":
            text = parse_text(item.get("output"), f"{path}.output", TEXT_PART_TYPES)
            builder.add_tool_result(get_string(item, "call_id", path), text)
        case "reasoning":
            parts = parse_object_list(item.get("content") or [], f"{path}.content")
            if parts:
                text = parse_text(parts, f"{path}.content", ("reasoning_text",))
                builder.add_reasoning(text)
        case "compaction":
            builder.add_assistant_text(_decode_summary(item, path))


def _add_message(builder: ChatMessageBuilder, item: JsonObject, path: str) -> None:
    """Add an input item of type message to the chat messages. Raises FieldError."""
    role = item.get("role")
    if role not in ROLES:
        raise_field_error(f"{path}.role", f"one of {', '.join(ROLES)}", role)
    text = parse_text(item.get("content"), f"{path}.content", TEXT_PART_TYPES)
    if role == "assistant":
        builder.add_assistant_text(text)
    else:
        builder.add_message(role, text)


def encode_summary(summary: str) -> str:
    """Return the `encrypted_content` of a compaction item.

    The summary is encoded, not encrypted: clients pass it back without reading it.
    """
    return SUMMARY_PREFIX + base64.b64encode(summary.encode()).decode()


def _decode_summary(item: JsonObject, path: str) -> str:
    """Return the summary of a compaction item. Raises FieldError."""
    content = get_string(item, "encrypted_content", path)
    try:
        if not content.startswith(SUMMARY_PREFIX):
            raise ValueError
        return base64.b64decode(content.removeprefix(SUMMARY_PREFIX), validate=True).decode()
    except (ValueError, binascii.Error):
        raise_unsupported(f"{path}.encrypted_content", "was not created by this kind of server")
