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
from gllm.frontend.fields.body import Count, Int, ModelBody, Refused, about
from gllm.frontend.fields.generation import UNSUPPORTED, Sampling
from gllm.frontend.fields.response_items import (
    ITEMS,
    convert_format,
    convert_input,
    convert_tool,
    convert_tool_choice,
)
from gllm.frontend.fields.turns import refuse

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
    about(f"a user's text, or items of type {', '.join(ITEMS)}; content is text"),
]
Instructions = Annotated[str | None, about("the system message, in front of the input")]
Text = Annotated[
    TextOptions | None,
    about("format: text, json_object or json_schema; verbosity has no effect"),
]
Effort = Annotated[
    Reasoning | None,
    about(
        "effort, as reasoning_effort of chat completions; the rest has no effect: what the model "
        "thinks comes whole"
    ),
]
Tools = Annotated[
    list[dict[str, Any]] | None,
    about("tools that the model may call, of type function or custom; custom input is text"),
]
Choice = Annotated[
    str | dict[str, Any] | None,
    about("none, auto, required, a function or custom tool by its name, or allowed_tools"),
]


class ResponseFields(Sampling):
    """POST /v1/responses."""

    required: ClassVar[tuple[str, ...]] = ("input",)
    inert: ClassVar[Mapping[str, str]] = {
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
    refused: ClassVar[Mapping[str, Refused]] = {
        **UNSUPPORTED,
        "previous_response_id": Refused(NOT_KEPT),
        "conversation": Refused(NOT_KEPT),
        "background": Refused("asks for an answer to be kept, which is not done here", (False,)),
        "prompt": Refused("names a stored template, but none are stored here"),
        "moderation": Refused("is not done here"),
        "context_management": Refused("is not done here", ([],)),
    }

    input: Input = None
    instructions: Instructions = None
    max_output_tokens: Annotated[
        Count | None, about("most tokens of the answer; default: the rest of the context")
    ] = None
    stop: Annotated[
        str | list[str] | None, about("up to 32 strings that end the text, and are cut off it")
    ] = None
    text: Text = None
    reasoning: Effort = None
    tools: Tools = None
    tool_choice: Choice = None
    parallel_tool_calls: Annotated[bool | None, about("as in chat completions")] = None
    include: Annotated[
        list[str] | None,
        about(f"{LOGPROBS}: log-probabilities; what else it may name is not there to be told"),
    ] = None
    top_logprobs: Annotated[
        Int | None,
        about(
            "0..20 likeliest tokens at each place, with log-probabilities",
            minimum=0,
            maximum=MAX_LOGPROBS,
        ),
    ] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        about("auto: cut the rendered prompt's beginning where it is too long; default disabled"),
    ] = None
    metadata: Annotated[dict[str, str] | None, about("shown in the answer")] = None
    prompt_cache_options: Annotated[
        CacheOptions | None, about("no effect, but for prewarm, which is refused")
    ] = None

    def check(self) -> None:
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


class InputTokensFields(ModelBody):
    """POST /v1/responses/input_tokens."""

    required: ClassVar[tuple[str, ...]] = ("input",)
    inert: ClassVar[Mapping[str, str]] = {
        "personality": "of OpenAI's models",
        "parallel_tool_calls": "the input is the same",
        "truncation": "the input is counted as it was sent",
    }
    refused: ClassVar[Mapping[str, Refused]] = {
        "previous_response_id": Refused(NOT_KEPT),
        "conversation": Refused(NOT_KEPT),
    }

    input: Input = None
    instructions: Instructions = None
    text: Text = None
    reasoning: Effort = None
    tools: Tools = None
    tool_choice: Choice = None


class CompactFields(ModelBody):
    """POST /v1/responses/compact."""

    required: ClassVar[tuple[str, ...]] = ("input",)
    inert: ClassVar[Mapping[str, str]] = {
        "prompt_cache_key": "where to look for cached prefixes; they are found by what they hold",
        "prompt_cache_options": "how to cache prefixes; all are",
        "prompt_cache_retention": "how long to keep cached prefixes; while there is room",
        "service_tier": "there is one",
        "image": "how to take images; none are taken",
    }
    refused: ClassVar[Mapping[str, Refused]] = {"previous_response_id": Refused(NOT_KEPT)}

    input: Input = None
    instructions: Instructions = None


def prompt_fields(fields: ResponseFields | InputTokensFields) -> Json:
    """Return the fields of chat completions that make the same prompt. Raises FieldError."""
    tools = [convert_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.tools or ())]
    return {
        "messages": convert_input(fields.input, fields.instructions),
        "response_format": convert_format(fields.text.format if fields.text else None),
        "reasoning_effort": None if fields.reasoning is None else fields.reasoning.effort,
        "tools": tools or None,
        "tool_choice": convert_tool_choice(fields.tool_choice),
    }


def as_chat(fields: ResponseFields) -> Json:
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
