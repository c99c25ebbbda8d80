"""Request fields of POST /v1/responses, /v1/responses/input_tokens and /v1/responses/compact.

`convert_responses_to_chat` and `convert_prompt_to_chat` return the fields of chat completions for
the same request.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from gllm.frontend.fields.base import (
    Int64,
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
from gllm.frontend.fields.generation import COMMON_UNSUPPORTED_FIELDS, SamplingFields
from gllm.frontend.fields.value_errors import raise_field_error, raise_unsupported
from gllm.options.field_types import FieldError
from gllm.options.limits import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    check_lengths,
    check_size,
)
from gllm.text.chat.placeholders import find_question
from gllm.text.chat.tools import CUSTOM_INPUT_KEY, MAX_NAME_CHARACTERS, TOOL_TYPES

ROLES = ("user", "assistant", "system", "developer")
TEXT_PART_TYPES = ("input_text", "output_text", "text", "refusal")
ITEM_TYPES = (
    "message",
    "function_call",
    "custom_tool_call",
    "function_call_output",
    "custom_tool_call_output",
    "reasoning",
    "compaction",
)
SERVER_ITEM_TYPES = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "computer_call",
    "computer_call_output",
    "local_shell_call",
    "local_shell_call_output",
    "shell_call",
    "shell_call_output",
    "apply_patch_call",
    "apply_patch_call_output",
    "tool_search_call",
    "tool_search_output",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
)
"""Items of hosted tools, from an earlier answer of another server. They are left out."""
TOOL_CHOICE_TYPES = (*TOOL_TYPES, "allowed_tools")
SUMMARY_PREFIX = "gllm-summary:"
"""Start of `encrypted_content` of the compaction items that this server creates."""
FUNCTION_KEYS = ("name", "description", "parameters", "strict")
CUSTOM_TOOL_KEYS = ("name", "description", "format")


def convert_input(
    input_items: str | list[JsonObject] | None,
    instructions: str | None,
    warn: Warn = bool,
    history: Sequence[JsonObject] = (),
) -> list[JsonObject]:
    """Convert `input` and `instructions` of the Responses API to chat messages.

    Args:
        input_items: Value of `input`.
        instructions: Value of `instructions`.
        warn: Gets a warning for each item that is left out.
        history: Items of the stored conversation that the input continues.

    Raises:
        FieldError: An item is invalid or not supported.
    """
    if not input_items:
        raise FieldError("input", "input has to be a string or a list of items, and not empty")
    items = [*history, *to_items(input_items)]
    check_size("input", items, MAX_MESSAGES, "items")
    # A compacted conversation begins with consecutive user messages.
    has_summary = any(item.get("type") == "compaction" for item in items)
    builder = ChatMessageBuilder(merge_user_messages=has_summary)
    if instructions:
        builder.add_message("system", instructions)
    question = find_question(items)
    for index, item in enumerate(items):
        number = index - len(history)
        path = f"input[{number}]" if number >= 0 else f"stored[{index}]"
        if item.get("type") in SERVER_ITEM_TYPES:
            warn_left_out(warn, item, path)
        else:
            # Agents send earlier images again in every request.
            _add_item(builder, item, path, shows_media=index != question)
    if not builder.messages:
        raise FieldError("input", "input contains no messages, but at least one is required")
    return builder.messages


def to_items(input_items: str | list[JsonObject]) -> list[JsonObject]:
    """Return the value of `input` as a list of items."""
    if isinstance(input_items, str):
        return [{"type": "message", "role": "user", "content": input_items}]
    return input_items


def is_reference(item: JsonObject) -> bool:
    """Return True for an item of the input that refers to a stored one by its id."""
    return item.get("type") == "item_reference" or item.keys() == {"id"}


NOT_STORED = (
    "is not stored: send the conversation as input, or start the server with a larger "
    "--response-store-size or --response-store-ttl"
)


def resolve_references(
    items: list[JsonObject], get_items: Callable[[Collection[str]], Mapping[str, JsonObject]]
) -> list[JsonObject]:
    """Return items with stored ones in place of references to them.

    Args:
        items: The items of `input`.
        get_items: Returns the stored ones of several ids.

    Raises:
        FieldError: A reference has no id, the id of another reference, or that of no stored item.
    """
    references: dict[str, int] = {}
    for index, item in enumerate(items):
        if is_reference(item):
            item_id = get_string(item, "id", f"input[{index}]")
            if item_id in references:
                raise_unsupported(f"input[{index}]", f"refers to {item_id!r:.200} a second time")
            references[item_id] = index
    if not references:
        return items
    stored = get_items(references.keys())
    resolved = list(items)
    for item_id, index in references.items():
        if item_id not in stored:
            raise_unsupported(f"input[{index}]", f"has the id {item_id!r:.200}, which {NOT_STORED}")
        resolved[index] = stored[item_id]
    return resolved


def convert_format(text_format: JsonObject | None) -> JsonObject | None:
    """Convert `text.format` of the Responses API to `response_format` of chat completions."""
    if text_format is None or text_format.get("type") != "json_schema":
        return text_format
    json_schema = {name: value for name, value in text_format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": json_schema}


def convert_tools(tools: list[JsonObject], warn: Warn = bool) -> list[JsonObject]:
    """Convert `tools` of the Responses API to the form of chat completions.

    Tools of a namespace become tools with longer names. Hosted tools are left out.

    Raises:
        FieldError: A tool is invalid.
    """
    return [
        convert_tool({**tool, "name": flat_name(namespace, tool.get("name"))}, path)
        for namespace, tool, path in _client_tools(tools, warn)
    ]


def namespaced_names(tools: list[JsonObject]) -> dict[str, tuple[str, str]]:
    """Return namespace and name of the tools in namespaces, by the name that the model sees."""
    return {
        flat_name(namespace, tool["name"]): (namespace, tool["name"])
        for namespace, tool, _ in _client_tools(tools, bool)
        if namespace
    }


def flat_name(namespace: object, name: Any) -> Any:
    """Return the name by which the model calls a tool of a namespace.

    A name that is too long is cut and ends with a digest. A value that is not a string is returned
    as it is, and so is a name without a namespace.
    """
    if not isinstance(namespace, str) or not namespace or not isinstance(name, str):
        return name
    flat = f"{namespace.rstrip('_')}__{name}"
    if len(flat) <= MAX_NAME_CHARACTERS:
        return flat
    digest = hashlib.sha256(flat.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{flat[: MAX_NAME_CHARACTERS - 9]}_{digest}"


def _client_tools(tools: list[JsonObject], warn: Warn) -> Iterator[tuple[str, JsonObject, str]]:
    """Yield namespace, tool and path of the tools that the client runs. Raises FieldError."""
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if tool.get("type") == "namespace":
            namespace = get_string(tool, "name", path)
            for i, member in enumerate(parse_object_list(tool.get("tools"), f"{path}.tools")):
                if is_hosted_tool(member):
                    warn_left_out(warn, member, f"{path}.tools[{i}]")
                else:
                    yield namespace, member, f"{path}.tools[{i}]"
        elif is_hosted_tool(tool):
            warn_left_out(warn, tool, path)
        else:
            yield "", tool, path


def convert_tool(tool: JsonObject, path: str) -> JsonObject:
    """Convert a tool of the Responses API to the form of chat completions.

    Args:
        tool: The JSON object of the tool.
        path: Its path in the request body, for errors.

    Raises:
        FieldError: The tool is invalid or not supported.
    """
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
    """Convert `tool_choice` of the Responses API to the form of chat completions.

    Raises:
        FieldError: The value is invalid.
    """
    if not isinstance(tool_choice, dict):
        return tool_choice
    check_type(tool_choice, "tool_choice", TOOL_CHOICE_TYPES)
    if tool_choice["type"] != "allowed_tools":
        return _convert_tool_name(tool_choice, "tool_choice")
    path = "tool_choice.tools"
    tools = [
        _convert_tool_name(tool, f"{path}[{index}]")
        for index, tool in enumerate(parse_object_list(tool_choice.get("tools"), path))
        if not is_hosted_tool(tool)
    ]
    if tool_choice.get("tools") and not tools and tool_choice.get("mode") == "auto":
        return "none"
    allowed_tools = {"mode": tool_choice.get("mode"), "tools": tools}
    return {"type": "allowed_tools", "allowed_tools": allowed_tools}


def _convert_tool_name(tool: JsonObject, path: str) -> JsonObject:
    """Return a tool's type and name in the form of chat completions. Raises FieldError."""
    check_type(tool, path, TOOL_TYPES)
    kind = tool["type"]
    name = flat_name(tool.get("namespace"), get_string(tool, "name", path))
    return {"type": kind, kind: {"name": name}}


def _add_item(builder: ChatMessageBuilder, item: JsonObject, path: str, shows_media: bool) -> None:
    """Add an input item to the chat messages. Raises FieldError."""
    check_type({"type": "message", **item}, path, ITEM_TYPES)
    match item.get("type", "message"):
        case "message":
            _add_message(builder, item, path, shows_media)
        case "function_call" | "custom_tool_call" as kind:
            call_id = get_string(item, "call_id", path)
            name = flat_name(item.get("namespace"), get_string(item, "name", path))
            if kind == "function_call":
                arguments = get_string(item, "arguments", path)
            else:
                values = {CUSTOM_INPUT_KEY: get_string(item, "input", path)}
                arguments = json.dumps(values, ensure_ascii=False)
            builder.add_tool_call(call_id, name, arguments)
        case "function_call_output" | "custom_tool_call_output":
            text = parse_result_text(item.get("output"), f"{path}.output")
            builder.add_tool_result(get_string(item, "call_id", path), text)
        case "reasoning":
            parts = parse_object_list(item.get("content") or [], f"{path}.content")
            if parts:
                text = parse_text(parts, f"{path}.content", ("reasoning_text",))
                builder.add_reasoning(text)
        case "compaction":
            builder.add_assistant_text(_decode_summary(item, path))


def _add_message(
    builder: ChatMessageBuilder, item: JsonObject, path: str, shows_media: bool
) -> None:
    """Add an input item of type message to the chat messages. Raises FieldError."""
    role = item.get("role")
    if role not in ROLES:
        raise_field_error(f"{path}.role", f"one of {', '.join(ROLES)}", role)
    text = parse_text(item.get("content"), f"{path}.content", TEXT_PART_TYPES, shows_media)
    if role == "assistant":
        builder.add_assistant_text(text)
    else:
        builder.add_message(role, text)


def encode_summary(summary: str) -> str:
    """Encode a conversation's summary as the `encrypted_content` of a compaction item.

    The text is Base64, not encrypted: clients pass it back unchanged.
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


INCLUDE_LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that requests log-probabilities."""
NOTHING_STORED_REASON = (
    "refers to a stored conversation, but this server has none: use previous_response_id, or send "
    "the whole conversation as input"
)
CACHE_KEY_PURPOSE = "selects a prefix cache; prefixes are found by their content"
CACHE_RETENTION_PURPOSE = "time to keep cached prefixes; they are kept while memory allows"
SERVICE_TIER_PURPOSE = "selects a service tier; there is only one"
IMAGE_PURPOSE = "options for images, which are not supported"
CLIENT_FIELD_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""Fields of this API for fields of chat completions, where the names differ."""


class ReasoningOptions(msgspec.Struct):
    """`reasoning` of the Responses API: reasoning effort."""

    effort: str | None = None


class TextOptions(msgspec.Struct):
    """`text` of the Responses API: format of the output text, such as a JSON Schema."""

    format: dict[str, Any] | None = None


class PromptCacheOptions(msgspec.Struct):
    """`prompt_cache_options` of the Responses API: use of the prefix cache."""

    prewarm: bool | None = None


InputField = Annotated[
    str | list[dict[str, Any]] | None,
    doc(
        f"text of the user, or a list of items of type {', '.join(ITEM_TYPES)}, whose content is "
        "text, or item_reference, which has the id of a stored item"
    ),
]
PreviousResponseField = Annotated[
    str | None,
    doc("id of a stored response: its conversation, without instructions, precedes the input"),
]
InstructionsField = Annotated[str | None, doc("system message in front of the input")]
TextField = Annotated[
    TextOptions | None,
    doc("format: of type text, json_object or json_schema; verbosity has no effect"),
]
ReasoningField = Annotated[
    ReasoningOptions | None,
    doc(
        "effort: as reasoning_effort of chat completions; other members have no effect: reasoning "
        "is returned in full"
    ),
]
ToolsField = Annotated[
    list[dict[str, Any]] | None,
    doc(
        "tools that the model may call, of type function or custom, whose input is text, or "
        "namespace, which has such tools; others are left out, with a header `Warning`"
    ),
]
ToolChoiceField = Annotated[
    str | dict[str, Any] | None,
    doc("none, auto, required, a function or custom tool by name, or allowed_tools"),
]


def _refers_to_stored(fields: "ResponsesFields | InputTokensFields | CompactFields") -> bool:
    """Return True if a request continues a stored response or has references to stored items."""
    items = fields.input if isinstance(fields.input, list) else []
    return fields.previous_response_id is not None or any(map(is_reference, items))


class ResponsesFields(SamplingFields):
    """Request body of POST /v1/responses."""

    required_fields: ClassVar[tuple[str, ...]] = ("input",)
    ignored_fields: ClassVar[Mapping[str, str]] = {
        "user": "identifies the end user",
        "safety_identifier": "identifies the end user",
        "service_tier": SERVICE_TIER_PURPOSE,
        "prompt_cache_retention": CACHE_RETENTION_PURPOSE,
        "stream_options": "enables padding that hides the sizes of events from eavesdroppers",
        "max_tool_calls": "limits calls of tools that the server runs; this server runs none",
        "image": IMAGE_PURPOSE,
        "access_programs": "applies to OpenAI's models only",
    }
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {
        **COMMON_UNSUPPORTED_FIELDS,
        "conversation": UnsupportedField(NOTHING_STORED_REASON),
        "background": UnsupportedField(
            "requests an answer without a connection, which is not supported", (False,)
        ),
        "prompt": UnsupportedField("refers to a stored template, but this server stores none"),
        "moderation": UnsupportedField("is not supported"),
        "context_management": UnsupportedField("is not supported", ([],)),
    }

    input: InputField = None
    instructions: InstructionsField = None
    max_output_tokens: Annotated[
        PositiveInt | None,
        doc("maximum number of output tokens; default: the rest of the context"),
    ] = None
    stop: Annotated[
        str | list[str] | None,
        doc("up to 32 strings that end the text and are removed from it"),
    ] = None
    text: TextField = None
    reasoning: ReasoningField = None
    tools: ToolsField = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: Annotated[bool | None, doc("as in chat completions")] = None
    include: Annotated[
        list[str] | None,
        doc(f"{INCLUDE_LOGPROBS}: return log-probabilities; other values have no effect"),
    ] = None
    top_logprobs: Annotated[
        Int64 | None,
        doc(
            "in [0, 20]: number of most likely tokens to return per position, with their "
            "log-probabilities",
            minimum=0,
            maximum=MAX_LOGPROBS,
        ),
    ] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        doc(
            "auto: remove the beginning of the rendered prompt if it is too long; default disabled"
        ),
    ] = None
    store: Annotated[
        bool | None,
        doc("false: do not store the response; default true, within --response-store-size"),
    ] = None
    previous_response_id: PreviousResponseField = None
    metadata: Annotated[dict[str, str] | None, doc("labels that the answer repeats")] = None
    prompt_cache_options: Annotated[
        PromptCacheOptions | None, doc("no effect; prewarm true is rejected")
    ] = None

    refers_to_stored = property(_refers_to_stored)

    def validate(self) -> None:
        """Check sizes and rules that involve several fields. Raises FieldError."""
        metadata = self.metadata or {}
        check_size("metadata", metadata, MAX_METADATA)
        check_lengths("metadata", metadata, MAX_METADATA_KEY)
        check_lengths("metadata", metadata.values(), MAX_METADATA_VALUE)
        if self.prompt_cache_options is not None and self.prompt_cache_options.prewarm:
            raise_unsupported("prompt_cache_options.prewarm", "true is not supported")
        if self.truncation is not None and self.truncate_prompt_tokens is not None:
            message = "truncation is not allowed together with truncate_prompt_tokens"
            raise FieldError("truncation", message)


class InputTokensFields(ModelRequestFields):
    """Request body of POST /v1/responses/input_tokens."""

    required_fields: ClassVar[tuple[str, ...]] = ("input",)
    ignored_fields: ClassVar[Mapping[str, str]] = {
        "personality": "applies to OpenAI's models only",
        "parallel_tool_calls": "does not change the input",
        "truncation": "truncates the input; tokens are counted before truncation",
    }
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {
        "conversation": UnsupportedField(NOTHING_STORED_REASON),
    }

    input: InputField = None
    previous_response_id: PreviousResponseField = None
    instructions: InstructionsField = None
    text: TextField = None
    reasoning: ReasoningField = None
    tools: ToolsField = None
    tool_choice: ToolChoiceField = None

    refers_to_stored = property(_refers_to_stored)


class CompactFields(ModelRequestFields):
    """Request body of POST /v1/responses/compact."""

    required_fields: ClassVar[tuple[str, ...]] = ("input",)
    ignored_fields: ClassVar[Mapping[str, str]] = {
        "prompt_cache_key": CACHE_KEY_PURPOSE,
        "prompt_cache_options": "options of the prefix cache; all prefixes are cached",
        "prompt_cache_retention": CACHE_RETENTION_PURPOSE,
        "service_tier": SERVICE_TIER_PURPOSE,
        "image": IMAGE_PURPOSE,
    }
    input: InputField = None
    previous_response_id: PreviousResponseField = None
    instructions: InstructionsField = None

    refers_to_stored = property(_refers_to_stored)


def convert_prompt_to_chat(
    fields: ResponsesFields | InputTokensFields,
    warn: Warn = bool,
    history: Sequence[JsonObject] = (),
) -> JsonObject:
    """Convert input, instructions and tools of a Responses API request to chat completion fields.

    Args:
        fields: The parsed request body.
        warn: Gets a warning for each part of the request that has no effect.
        history: Items of the stored conversation that the request continues.

    Raises:
        FieldError: A value is invalid or not supported.
    """
    return {
        "messages": convert_input(fields.input, fields.instructions, warn, history),
        "response_format": convert_format(fields.text.format if fields.text else None),
        "reasoning_effort": None if fields.reasoning is None else fields.reasoning.effort,
        "tools": convert_tools(fields.tools or [], warn) or None,
        "tool_choice": convert_tool_choice(fields.tool_choice),
    }


def convert_responses_to_chat(
    fields: ResponsesFields, warn: Warn = bool, history: Sequence[JsonObject] = ()
) -> JsonObject:
    """Convert a Responses API request to the fields of the equivalent chat completion request.

    Args:
        fields: The parsed request body.
        warn: Gets a warning for each part of the request that has no effect.
        history: Items of the stored conversation that the request continues.

    Raises:
        FieldError: A value is invalid or not supported.
    """
    has_logprobs = INCLUDE_LOGPROBS in (fields.include or ()) or fields.top_logprobs
    values: JsonObject = {
        **convert_prompt_to_chat(fields, warn, history),
        "parallel_tool_calls": fields.parallel_tool_calls,
        "max_tokens": fields.max_output_tokens,
        "stop": fields.stop,
        "logprobs": True if has_logprobs else None,
        "top_logprobs": fields.top_logprobs,
    }
    if fields.truncation == "auto":
        values["truncate_prompt_tokens"] = -1
    return values
