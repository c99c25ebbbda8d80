"""Request fields of POST /v1/responses, /v1/responses/input_tokens and /v1/responses/compact.

`convert_responses_to_chat` and `convert_prompt_to_chat` return the fields of chat completions for
the same request.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from gllm.frontend.fields.base import (
    Int64,
    JsonObject,
    ModelRequestFields,
    PositiveInt,
    UnsupportedField,
    doc,
)
from gllm.frontend.fields.generation import COMMON_UNSUPPORTED_FIELDS, SamplingFields
from gllm.frontend.fields.response_items import (
    ITEM_TYPES,
    convert_format,
    convert_input,
    convert_tool,
    convert_tool_choice,
)
from gllm.frontend.fields.value_errors import raise_unsupported
from gllm.options.field_types import FieldError
from gllm.options.limits import (
    MAX_LOGPROBS,
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    check_lengths,
    check_size,
)

INCLUDE_LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that requests log-probabilities."""
NOTHING_STORED_REASON = (
    "refers to a stored answer, but this server stores none: send the whole conversation as input"
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
    """`reasoning`: amount of reasoning."""

    effort: str | None = None


class TextOptions(msgspec.Struct):
    """`text`: format of the text."""

    format: dict[str, Any] | None = None


class PromptCacheOptions(msgspec.Struct):
    """`prompt_cache_options`: use of the prefix cache."""

    prewarm: bool | None = None


InputField = Annotated[
    str | list[dict[str, Any]] | None,
    doc(
        f"text of the user, or a list of items of type {', '.join(ITEM_TYPES)}, whose content is "
        "text"
    ),
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
    doc("tools that the model may call, of type function or custom, whose input is text"),
]
ToolChoiceField = Annotated[
    str | dict[str, Any] | None,
    doc("none, auto, required, a function or custom tool by name, or allowed_tools"),
]


class ResponsesFields(SamplingFields):
    """POST /v1/responses."""

    required_fields: ClassVar[tuple[str, ...]] = ("input",)
    ignored_fields: ClassVar[Mapping[str, str]] = {
        "store": "requests that the answer is stored; this server stores nothing",
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
        "previous_response_id": UnsupportedField(NOTHING_STORED_REASON),
        "conversation": UnsupportedField(NOTHING_STORED_REASON),
        "background": UnsupportedField(
            "requests an answer that is stored, which is not supported", (False,)
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
    metadata: Annotated[dict[str, str] | None, doc("labels that the answer repeats")] = None
    prompt_cache_options: Annotated[
        PromptCacheOptions | None, doc("no effect; prewarm true is rejected")
    ] = None

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
    """POST /v1/responses/input_tokens."""

    required_fields: ClassVar[tuple[str, ...]] = ("input",)
    ignored_fields: ClassVar[Mapping[str, str]] = {
        "personality": "applies to OpenAI's models only",
        "parallel_tool_calls": "does not change the input",
        "truncation": "truncates the input; tokens are counted before truncation",
    }
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {
        "previous_response_id": UnsupportedField(NOTHING_STORED_REASON),
        "conversation": UnsupportedField(NOTHING_STORED_REASON),
    }

    input: InputField = None
    instructions: InstructionsField = None
    text: TextField = None
    reasoning: ReasoningField = None
    tools: ToolsField = None
    tool_choice: ToolChoiceField = None


class CompactFields(ModelRequestFields):
    """POST /v1/responses/compact."""

    required_fields: ClassVar[tuple[str, ...]] = ("input",)
    ignored_fields: ClassVar[Mapping[str, str]] = {
        "prompt_cache_key": CACHE_KEY_PURPOSE,
        "prompt_cache_options": "options of the prefix cache; all prefixes are cached",
        "prompt_cache_retention": CACHE_RETENTION_PURPOSE,
        "service_tier": SERVICE_TIER_PURPOSE,
        "image": IMAGE_PURPOSE,
    }
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {
        "previous_response_id": UnsupportedField(NOTHING_STORED_REASON)
    }

    input: InputField = None
    instructions: InstructionsField = None


def convert_prompt_to_chat(fields: ResponsesFields | InputTokensFields) -> JsonObject:
    """Return the fields of the chat completion with the same prompt. Raises FieldError."""
    tools = [convert_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.tools or ())]
    return {
        "messages": convert_input(fields.input, fields.instructions),
        "response_format": convert_format(fields.text.format if fields.text else None),
        "reasoning_effort": None if fields.reasoning is None else fields.reasoning.effort,
        "tools": tools or None,
        "tool_choice": convert_tool_choice(fields.tool_choice),
    }


def convert_responses_to_chat(fields: ResponsesFields) -> JsonObject:
    """Return the fields of the equivalent chat completion. Raises FieldError."""
    has_logprobs = INCLUDE_LOGPROBS in (fields.include or ()) or fields.top_logprobs
    values: JsonObject = {
        **convert_prompt_to_chat(fields),
        "parallel_tool_calls": fields.parallel_tool_calls,
        "max_tokens": fields.max_output_tokens,
        "stop": fields.stop,
        "logprobs": True if has_logprobs else None,
        "top_logprobs": fields.top_logprobs,
    }
    if fields.truncation == "auto":
        values["truncate_prompt_tokens"] = -1
    return values
