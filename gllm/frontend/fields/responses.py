"""The fields of POST /v1/responses and of what counts and compacts its input, and their conversion
to chat completions."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from gllm.config.field_types import FieldError
from gllm.config.limits import (
    MAX_LOGPROBS,
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    check_lengths,
    check_size,
)
from gllm.frontend.fields.base import Int64, ModelRequestFields, PositiveInt, UnsupportedField, doc
from gllm.frontend.fields.chat_messages import refuse
from gllm.frontend.fields.generation import UNSUPPORTED, SamplingFields
from gllm.frontend.fields.response_items import (
    ITEMS,
    convert_format,
    convert_input,
    convert_tool,
    convert_tool_choice,
)

Json = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"
NOT_KEPT = "names an answer, but no answer is kept here: send the whole conversation as input"
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""What this API calls fields of chat completions."""


class Reasoning(msgspec.Struct):
    """How much to think."""

    effort: str | None = None


class TextOptions(msgspec.Struct):
    """The form of the text."""

    format: dict[str, Any] | None = None


class CacheOptions(msgspec.Struct):
    """What to do with the prefix cache."""

    prewarm: bool | None = None


Input = Annotated[
    str | list[dict[str, Any]] | None,
    doc(f"a user's text, or items of type {', '.join(ITEMS)}; content is text"),
]
Instructions = Annotated[str | None, doc("the system message, in front of the input")]
Text = Annotated[
    TextOptions | None,
    doc("format: text, json_object or json_schema; verbosity has no effect"),
]
ReasoningEffort = Annotated[
    Reasoning | None,
    doc(
        "effort, as reasoning_effort of chat completions; the rest has no effect: what the model "
        "thinks comes whole"
    ),
]
Tools = Annotated[
    list[dict[str, Any]] | None,
    doc("tools that the model may call, of type function or custom; custom input is text"),
]
Choice = Annotated[
    str | dict[str, Any] | None,
    doc("none, auto, required, a function or custom tool by its name, or allowed_tools"),
]


class ResponsesFields(SamplingFields):
    """POST /v1/responses."""

    required_fields: ClassVar[tuple[str, ...]] = ("input",)
    ignored_fields: ClassVar[Mapping[str, str]] = {
        "store": "whether to keep the answer; nothing is kept",
        "user": "who asks",
        "safety_identifier": "who asks",
        "service_tier": "there is one",
        "prompt_cache_key": "where to look for cached prefixes; they are found by what they hold",
        "prompt_cache_retention": "how long to keep cached prefixes; while there is room",
        "stream_options": "padding against those who watch the size of events",
        "max_tool_calls": "a bound on calls of tools that a server runs; this one runs none",
        "image": "how to take images; none are taken",
        "access_programs": "of OpenAI's models",
    }
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {
        **UNSUPPORTED,
        "previous_response_id": UnsupportedField(NOT_KEPT),
        "conversation": UnsupportedField(NOT_KEPT),
        "background": UnsupportedField(
            "asks for an answer to be kept, which is not done here", (False,)
        ),
        "prompt": UnsupportedField("names a stored template, but none are stored here"),
        "moderation": UnsupportedField("is not done here"),
        "context_management": UnsupportedField("is not done here", ([],)),
    }

    input: Input = None
    instructions: Instructions = None
    max_output_tokens: Annotated[
        PositiveInt | None, doc("most tokens of the answer; default: the rest of the context")
    ] = None
    stop: Annotated[
        str | list[str] | None, doc("up to 32 strings that end the text, and are cut off it")
    ] = None
    text: Text = None
    reasoning: ReasoningEffort = None
    tools: Tools = None
    tool_choice: Choice = None
    parallel_tool_calls: Annotated[bool | None, doc("as in chat completions")] = None
    include: Annotated[
        list[str] | None,
        doc(f"{LOGPROBS}: log-probabilities; what else it may name is not there to be told"),
    ] = None
    top_logprobs: Annotated[
        Int64 | None,
        doc(
            "0..20 likeliest tokens at each place, with log-probabilities",
            minimum=0,
            maximum=MAX_LOGPROBS,
        ),
    ] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        doc("auto: cut the rendered prompt's beginning where it is too long; default disabled"),
    ] = None
    metadata: Annotated[dict[str, str] | None, doc("shown in the answer")] = None
    prompt_cache_options: Annotated[
        CacheOptions | None, doc("no effect, but for prewarm, which is refused")
    ] = None

    def validate(self) -> None:
        """Raises FieldError for fields that do not go together, or are too large."""
        metadata = self.metadata or {}
        check_size("metadata", metadata, MAX_METADATA)
        check_lengths("metadata", metadata, MAX_METADATA_KEY)
        check_lengths("metadata", metadata.values(), MAX_METADATA_VALUE)
        if self.prompt_cache_options is not None and self.prompt_cache_options.prewarm:
            refuse("prompt_cache_options.prewarm", "is not done here")
        if self.truncation is not None and self.truncate_prompt_tokens is not None:
            raise FieldError(
                "truncation", "truncation and truncate_prompt_tokens exclude each other"
            )


class InputTokensFields(ModelRequestFields):
    """POST /v1/responses/input_tokens."""

    required_fields: ClassVar[tuple[str, ...]] = ("input",)
    ignored_fields: ClassVar[Mapping[str, str]] = {
        "personality": "of OpenAI's models",
        "parallel_tool_calls": "the input is the same",
        "truncation": "the input is counted as it was sent",
    }
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {
        "previous_response_id": UnsupportedField(NOT_KEPT),
        "conversation": UnsupportedField(NOT_KEPT),
    }

    input: Input = None
    instructions: Instructions = None
    text: Text = None
    reasoning: ReasoningEffort = None
    tools: Tools = None
    tool_choice: Choice = None


class CompactFields(ModelRequestFields):
    """POST /v1/responses/compact."""

    required_fields: ClassVar[tuple[str, ...]] = ("input",)
    ignored_fields: ClassVar[Mapping[str, str]] = {
        "prompt_cache_key": "where to look for cached prefixes; they are found by what they hold",
        "prompt_cache_options": "how to cache prefixes; all are",
        "prompt_cache_retention": "how long to keep cached prefixes; while there is room",
        "service_tier": "there is one",
        "image": "how to take images; none are taken",
    }
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {
        "previous_response_id": UnsupportedField(NOT_KEPT)
    }

    input: Input = None
    instructions: Instructions = None


def prompt_fields(fields: ResponsesFields | InputTokensFields) -> Json:
    """Return the fields of chat completions that make the same prompt. Raises FieldError."""
    tools = [convert_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.tools or ())]
    return {
        "messages": convert_input(fields.input, fields.instructions),
        "response_format": convert_format(fields.text.format if fields.text else None),
        "reasoning_effort": None if fields.reasoning is None else fields.reasoning.effort,
        "tools": tools or None,
        "tool_choice": convert_tool_choice(fields.tool_choice),
    }


def as_chat(fields: ResponsesFields) -> Json:
    """Return the fields of chat completions that ask for the same. Raises FieldError."""
    told = LOGPROBS in (fields.include or ()) or fields.top_logprobs
    values: Json = {
        **prompt_fields(fields),
        "parallel_tool_calls": fields.parallel_tool_calls,
        "max_tokens": fields.max_output_tokens,
        "stop": fields.stop,
        "logprobs": True if told else None,
        "top_logprobs": fields.top_logprobs,
    }
    if fields.truncation == "auto":
        values["truncate_prompt_tokens"] = -1
    return values
