"""Request fields of POST /v1/messages and /v1/messages/count_tokens (Anthropic's Messages API).

`convert_messages_to_chat` returns the fields of chat completions for the same request.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from gllm.frontend.fields.base import (
    JsonObject,
    ModelRequestFields,
    PositiveInt,
    UnsupportedField,
    Warn,
    doc,
)
from gllm.frontend.fields.chat_messages import (
    ChatMessageBuilder,
    check_type,
    get_string,
    is_hosted_tool,
    parse_object_list,
    parse_result_text,
    parse_text,
    warn_left_out,
)
from gllm.frontend.fields.generation import COMMON_UNSUPPORTED_FIELDS, ParseSpecial, SamplingFields
from gllm.frontend.fields.value_errors import raise_field_error
from gllm.options.field_types import FieldError
from gllm.options.limits import MAX_MESSAGES, check_size
from gllm.text.chat.placeholders import describe_part, find_question, is_media_part

TEXT_ONLY = ("text",)
BLOCK_TYPES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": TEXT_ONLY,
}
"""Supported types of content blocks for each role."""
SERVER_BLOCK_TYPES = (
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "compaction",
    "fallback",
)
"""Blocks of the assistant that only Anthropic's own server writes. They are left out."""
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""`tool_choice` of chat completions for each type except `tool`."""
CLIENT_FIELD_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "chat_template_kwargs": "thinking",
    "continue_final_message": "messages",
}
"""Fields of this API for fields of chat completions, where the names differ."""
IGNORED_FIELDS: Mapping[str, str] = {
    "metadata": "identifies the end user",
    "service_tier": "selects a service tier; there is only one",
    "speed": "selects a speed; there is only one",
    "inference_geo": "selects a region; there is only one",
    "user_profile_id": "identifies the end user",
    "workspace_id": "identifies the end user's workspace",
    "cache_control": "marks prefixes to cache; all prefixes are cached",
    "diagnostics": "requests the reason of a cache miss",
    "context_management": "selects content to remove from long contexts; nothing is removed",
}
UNSUPPORTED_FIELDS: Mapping[str, UnsupportedField] = {
    **COMMON_UNSUPPORTED_FIELDS,
    "container": UnsupportedField("is not supported"),
    "mcp_servers": UnsupportedField("is not supported: only the client can run tools", ([],)),
    "output_format": UnsupportedField("is an old name that is not supported: use output_config"),
}


class ThinkingOptions(msgspec.Struct):
    """`thinking` of the Messages API: enables or disables reasoning."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class MessagesToolChoice(msgspec.Struct):
    """`tool_choice` of the Messages API: the tools that the model may or must call."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(msgspec.Struct):
    """`output_config` of the Messages API: reasoning effort and output format."""

    effort: str | None = None
    format: dict[str, Any] | None = None


MessagesField = Annotated[
    list[dict[str, Any]] | None,
    doc(
        "messages of the chat, each with role and content; content is a string or a list of "
        "blocks; an image in the last message of the user is rejected, an earlier one becomes a "
        "text that says so"
    ),
]
SystemField = Annotated[
    str | list[dict[str, Any]] | None, doc("system message: a string or a list of text blocks")
]
ToolsField = Annotated[
    list[dict[str, Any]] | None,
    doc("tools that the client runs; those of other types are left out, with a header `Warning`"),
]
ToolChoiceField = Annotated[
    MessagesToolChoice | None,
    doc("type: auto, any, none, or tool with the name of the tool that the model has to call"),
]
ThinkingField = Annotated[
    ThinkingOptions | None,
    doc(
        "type: enabled, adaptive or disabled, for models that support both; budgets of tokens have "
        "no effect"
    ),
]
OutputConfigField = Annotated[
    OutputConfig | None,
    doc("effort: as reasoning_effort of chat completions; format: a json_schema for the text"),
]


class MessagesFields(SamplingFields):
    """Request body of POST /v1/messages."""

    required_fields: ClassVar[tuple[str, ...]] = ("messages", "max_tokens")
    ignored_fields: ClassVar[Mapping[str, str]] = IGNORED_FIELDS
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = UNSUPPORTED_FIELDS

    messages: MessagesField = None
    system: SystemField = None
    max_tokens: Annotated[PositiveInt | None, doc("maximum number of output tokens; required")] = (
        None
    )
    stop_sequences: Annotated[
        list[str] | None, doc("up to 32 strings that end the text and are removed from it")
    ] = None
    tools: ToolsField = None
    tool_choice: ToolChoiceField = None
    thinking: ThinkingField = None
    output_config: OutputConfigField = None


class CountTokensFields(ModelRequestFields):
    """Request body of POST /v1/messages/count_tokens."""

    required_fields: ClassVar[tuple[str, ...]] = ("messages",)
    ignored_fields: ClassVar[Mapping[str, str]] = IGNORED_FIELDS
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = UNSUPPORTED_FIELDS

    messages: MessagesField = None
    system: SystemField = None
    tools: ToolsField = None
    tool_choice: ToolChoiceField = None
    thinking: ThinkingField = None
    output_config: OutputConfigField = None
    parse_special: ParseSpecial = None


def convert_messages_to_chat(
    fields: MessagesFields | CountTokensFields, warn: Warn = bool
) -> JsonObject:
    """Convert a Messages API request to the fields of the equivalent chat completion request.

    Args:
        fields: The parsed request body.
        warn: Gets a warning for each part of the request that has no effect.

    Raises:
        FieldError: A value is invalid or not supported.
    """
    output_config = fields.output_config or OutputConfig()
    values: JsonObject = {
        "messages": _convert_messages(fields, warn),
        "tools": _convert_tools(fields.tools or [], warn) or None,
        "reasoning_effort": output_config.effort,
        "response_format": _convert_format(output_config),
    }
    if fields.tool_choice is not None:
        values["tool_choice"] = _convert_tool_choice(fields.tool_choice)
        if fields.tool_choice.disable_parallel_tool_use:
            values["parallel_tool_calls"] = False
    if fields.thinking is not None:
        is_enabled = fields.thinking.type != "disabled"
        values["chat_template_kwargs"] = {"enable_thinking": is_enabled, "thinking": is_enabled}
    if values["messages"][-1]["role"] == "assistant":
        values |= {"add_generation_prompt": False, "continue_final_message": True}
    if isinstance(fields, MessagesFields):
        values |= {"max_tokens": fields.max_tokens, "stop": fields.stop_sequences}
    return values


def _convert_messages(fields: MessagesFields | CountTokensFields, warn: Warn) -> list[JsonObject]:
    """Return the system message and the messages in the form of chat completions."""
    builder = ChatMessageBuilder(merge_user_messages=True)
    if fields.system:
        builder.add_message("system", parse_text(fields.system, "system", TEXT_ONLY))
    if not fields.messages:
        raise FieldError("messages", "messages has to be a list of messages, and not empty")
    check_size("messages", fields.messages, MAX_MESSAGES, "messages")
    question = _find_new_question(fields.messages)
    for index, message in enumerate(fields.messages):
        role, content, path = message.get("role"), message.get("content"), f"messages[{index}]"
        if not isinstance(role, str) or role not in BLOCK_TYPES:
            raise_field_error(f"{path}.role", f"one of {', '.join(BLOCK_TYPES)}", role)
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        blocks = parse_object_list(content, f"{path}.content")
        _add_blocks(builder, role, blocks, f"{path}.content", index != question, warn)
    if not builder.messages:
        raise FieldError("messages", "messages contain no content, but some is required")
    return builder.messages


def _find_new_question(messages: list[JsonObject]) -> int:
    """Return the index of the last message of the user, unless it has results of tools; else -1.

    Agents send images beside results again in every request.
    """
    index = find_question(messages)
    content = messages[index].get("content") if index >= 0 else None
    blocks = content if isinstance(content, list) else []
    has_result = any(
        isinstance(block, dict) and block.get("type") == "tool_result" for block in blocks
    )
    return -1 if has_result else index


def _add_blocks(
    builder: ChatMessageBuilder,
    role: str,
    blocks: list[JsonObject],
    path: str,
    shows_media: bool,
    warn: Warn,
) -> None:
    """Add the content blocks of a message; consecutive text blocks are joined by newlines.

    With `shows_media`, images and documents of the user become a text that says so.
    """
    texts: list[str] = []

    def add_texts() -> None:
        text = "\n".join(texts)
        if texts and role == "assistant":
            builder.add_assistant_text(text)
        elif texts:
            builder.add_message(role, text)
        texts.clear()

    for index, block in enumerate(blocks):
        block_path = f"{path}[{index}]"
        if role == "assistant" and block.get("type") in SERVER_BLOCK_TYPES:
            warn_left_out(warn, block, block_path)
            continue
        if role == "user" and (
            block.get("type") == "search_result" or (shows_media and is_media_part(block))
        ):
            texts.append(describe_part(block))
            continue
        check_type(block, block_path, BLOCK_TYPES[role])
        if block["type"] == "text":
            texts.append(get_string(block, "text", block_path))
        else:
            add_texts()
            _add_block(builder, block, block_path)
    add_texts()


def _add_block(builder: ChatMessageBuilder, block: JsonObject, path: str) -> None:
    """Add a content block that is not text. Redacted thinking is unreadable and is left out."""
    match block["type"]:
        case "thinking":
            builder.add_reasoning(get_string(block, "thinking", path))
        case "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise_field_error(f"{path}.input", "an object", arguments)
            call_id, name = get_string(block, "id", path), get_string(block, "name", path)
            builder.add_tool_call(call_id, name, json.dumps(arguments, ensure_ascii=False))
        case "tool_result":
            text = parse_result_text(block.get("content") or "", f"{path}.content")
            builder.add_tool_result(get_string(block, "tool_use_id", path), text)


def _convert_tools(tools: list[JsonObject], warn: Warn) -> list[JsonObject]:
    """Return the tools that the client runs in the form of chat completions. Raises FieldError."""
    converted = []
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if is_hosted_tool(tool):
            warn_left_out(warn, tool, path)
        else:
            converted.append(_convert_tool(tool, path))
    return converted


def _convert_tool(tool: JsonObject, path: str) -> JsonObject:
    """Return a tool in the form of chat completions. Raises FieldError."""
    if tool.get("type") is not None:
        check_type(tool, path, ("custom",))
    function = {"name": get_string(tool, "name", path), "parameters": tool.get("input_schema")}
    function |= {name: tool[name] for name in ("description", "strict") if name in tool}
    return {"type": "function", "function": function}


def _convert_tool_choice(tool_choice: MessagesToolChoice) -> str | JsonObject:
    """Return `tool_choice` in the form of chat completions. Raises FieldError."""
    if tool_choice.type != "tool":
        return TOOL_CHOICES[tool_choice.type]
    if tool_choice.name is None:
        raise FieldError("tool_choice", "tool_choice.name is missing, but type tool requires it")
    return {"type": "function", "function": {"name": tool_choice.name}}


def _convert_format(output_config: OutputConfig) -> JsonObject | None:
    """Return `output_config.format` as `response_format`. Raises FieldError."""
    if output_config.format is None:
        return None
    check_type(output_config.format, "output_config.format", ("json_schema",))
    schema = {"name": "answer", "schema": output_config.format.get("schema"), "strict": True}
    return {"type": "json_schema", "json_schema": schema}
