"""The fields of POST /v1/messages and of its count of tokens, and the way from them to chat
completions.

Owns the schemas and the forms of content blocks. Knows nothing of the answer.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from gllm.config.field_types import FieldError
from gllm.frontend.fields.base import ModelRequestFields, PositiveInt, UnsupportedField, doc
from gllm.frontend.fields.chat_messages import Turns, listed, refuse, string, text_of, unknown_type
from gllm.frontend.fields.generation import UNSUPPORTED, ParseSpecial, SamplingFields

Json = dict[str, Any]
TEXT = ("text",)
BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": TEXT,
}
"""Types of blocks by role."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
THINKS = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "chat_template_kwargs": "thinking",
    "continue_final_message": "messages",
}
"""What this API calls fields of chat completions."""
INERT = {
    "metadata": "who asks",
    "service_tier": "there is one",
    "speed": "there is one",
    "inference_geo": "there is one place",
    "user_profile_id": "who asks",
    "workspace_id": "who asks",
    "cache_control": "what to cache; all prefixes are",
    "diagnostics": "why a prefix was not cached",
    "context_management": "what to take out of long contexts; nothing is",
}
REFUSED = {
    **UNSUPPORTED,
    "container": UnsupportedField("is not done here"),
    "mcp_servers": UnsupportedField("is not done here: only the client runs tools", ([],)),
    "output_format": UnsupportedField("is the old name of output_config.format"),
}


class Thinking(msgspec.Struct):
    """Whether to think."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class ToolChoice(msgspec.Struct):
    """Which tool to use."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(msgspec.Struct):
    """How much to think, and the form of the text."""

    effort: str | None = None
    format: dict[str, Any] | None = None


Chat = Annotated[
    list[dict[str, Any]] | None,
    doc("the chat so far: role and content each; content is text or blocks, without images"),
]
System = Annotated[
    str | list[dict[str, Any]] | None, doc("the system message: text or blocks of text")
]
Tools = Annotated[list[dict[str, Any]] | None, doc("tools that the client runs; no other type")]
Choice = Annotated[
    ToolChoice | None, doc("type: auto, any, none, or tool with a name; which tool to use")
]
Thought = Annotated[
    Thinking | None,
    doc("type: enabled, adaptive or disabled, for models that can do both; no bound is kept"),
]
Output = Annotated[
    OutputConfig | None,
    doc("effort, as reasoning_effort of chat completions; format: a json_schema of the text"),
]


class MessagesFields(SamplingFields):
    """POST /v1/messages."""

    required_fields: ClassVar[tuple[str, ...]] = ("messages", "max_tokens")
    ignored_fields: ClassVar[Mapping[str, str]] = INERT
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = REFUSED

    messages: Chat = None
    system: System = None
    max_tokens: Annotated[PositiveInt | None, doc("most tokens of the answer; has to be there")] = (
        None
    )
    stop_sequences: Annotated[
        list[str] | None, doc("up to 32 strings that end the text, and are cut off it")
    ] = None
    tools: Tools = None
    tool_choice: Choice = None
    thinking: Thought = None
    output_config: Output = None

    def validate(self) -> None:
        """Raises FieldError for what has to be there."""
        if self.max_tokens is None:
            raise FieldError("max_tokens", "max_tokens has to be given")


class CountTokensFields(ModelRequestFields):
    """POST /v1/messages/count_tokens."""

    required_fields: ClassVar[tuple[str, ...]] = ("messages",)
    ignored_fields: ClassVar[Mapping[str, str]] = INERT
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = REFUSED

    messages: Chat = None
    system: System = None
    tools: Tools = None
    tool_choice: Choice = None
    thinking: Thought = None
    output_config: Output = None
    parse_special: ParseSpecial = None


def as_chat(fields: MessagesFields | CountTokensFields) -> Json:
    """Fields of chat completions that ask for the same. Raises FieldError."""
    output = fields.output_config or OutputConfig()
    values: Json = {
        "messages": _messages(fields),
        "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.tools or ())] or None,
        "reasoning_effort": output.effort,
        "response_format": _format(output),
    }
    if fields.tool_choice is not None:
        values["tool_choice"] = _choice(fields.tool_choice)
        if fields.tool_choice.disable_parallel_tool_use:
            values["parallel_tool_calls"] = False
    if fields.thinking is not None:
        thinks = THINKS[fields.thinking.type]
        values["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks}
    if values["messages"][-1]["role"] == "assistant":
        values |= {"add_generation_prompt": False, "continue_final_message": True}
    if isinstance(fields, MessagesFields):
        values |= {"max_tokens": fields.max_tokens, "stop": fields.stop_sequences}
    return values


def _messages(fields: MessagesFields | CountTokensFields) -> list[Json]:
    turns = Turns(joins=True)
    if fields.system:
        turns.say("system", text_of(fields.system, "system", TEXT))
    if not fields.messages:
        raise FieldError("messages", "messages has to be a list of messages, not empty")
    for i, message in enumerate(fields.messages):
        role, content, where = message.get("role"), message.get("content"), f"messages[{i}]"
        if not isinstance(role, str) or role not in BLOCKS:
            refuse(where, f"has to have a role of {', '.join(BLOCKS)}")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        _add_blocks(turns, role, listed(content, f"{where}.content"), f"{where}.content")
    if not turns.messages:
        raise FieldError("messages", "messages have no content")
    return turns.messages


def _add_blocks(turns: Turns, role: str, blocks: list[Json], where: str) -> None:
    """The content of a message as turns: texts that follow one another are one."""
    texts: list[str] = []

    def say() -> None:
        if texts:
            text = "\n".join(texts)
            turns.answer(text) if role == "assistant" else turns.say(role, text)
            texts.clear()

    for i, block in enumerate(blocks):
        here = f"{where}[{i}]"
        if block.get("type") not in BLOCKS[role]:
            unknown_type(block, here, BLOCKS[role])
        if block["type"] == "text":
            texts.append(string(block, "text", here))
        else:
            say()
            _add_block(turns, block, here)
    say()


def _add_block(turns: Turns, block: Json, where: str) -> None:
    """A block that is no text. What is redacted cannot be read by anybody."""
    match block["type"]:
        case "thinking":
            turns.think(string(block, "thinking", where))
        case "tool_use":
            given = block.get("input")
            if not isinstance(given, dict):
                refuse(where, "has to have an input that is an object")
            call_id, name = (string(block, one, where) for one in ("id", "name"))
            turns.call(call_id, name, json.dumps(given, ensure_ascii=False))
        case "tool_result":
            text = text_of(block.get("content") or "", f"{where}.content", TEXT)
            turns.result(string(block, "tool_use_id", where), text)


def _tool(tool: Json, where: str) -> Json:
    """A tool as chat completions have it."""
    if tool.get("type") not in (None, "custom"):
        unknown_type(tool, where, ("custom",))
    function = {"name": string(tool, "name", where), "parameters": tool.get("input_schema")}
    function |= {name: tool[name] for name in ("description", "strict") if name in tool}
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> str | Json:
    """A choice as chat completions have it."""
    if choice.type != "tool":
        return CHOICES[choice.type]
    if choice.name is None:
        raise FieldError("tool_choice", "tool_choice of type tool has to have a name")
    return {"type": "function", "function": {"name": choice.name}}


def _format(output: OutputConfig) -> Json | None:
    """A format as chat completions have it."""
    if output.format is None:
        return None
    if output.format.get("type") != "json_schema":
        unknown_type(output.format, "output_config.format", ("json_schema",))
    schema = {"name": "answer", "schema": output.format.get("schema"), "strict": True}
    return {"type": "json_schema", "json_schema": schema}
