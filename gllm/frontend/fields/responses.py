"""The fields of POST /v1/responses, and the way from them to chat completions.

Owns the schema and the forms of input items. Knows nothing of the answer.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from gllm.config import FieldError
from gllm.frontend.fields.body import Count, Int, Refused, about
from gllm.frontend.fields.generation import Sampling
from gllm.frontend.fields.turns import Turns, listed, refuse, string, text_of, unknown_type

Json = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")
TEXTS = ("input_text", "output_text", "text")
ITEMS = ("message", "function_call", "function_call_output", "reasoning")
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


class ResponseFields(Sampling):
    """POST /v1/responses."""

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
        "previous_response_id": Refused(NOT_KEPT),
        "conversation": Refused(NOT_KEPT),
        "background": Refused("asks for an answer to be kept, which is not done here", (False,)),
        "prompt": Refused("names a stored template, but none are stored here"),
        "moderation": Refused("is not done here"),
        "context_management": Refused("is not done here", ([],)),
    }

    input: Annotated[
        str | list[dict[str, Any]] | None,
        about(f"a user's text, or items of type {', '.join(ITEMS)}; content is text"),
    ] = None
    instructions: Annotated[str | None, about("the system message, in front of the input")] = None
    max_output_tokens: Annotated[
        Count | None, about("most tokens of the answer; default: the rest of the context")
    ] = None
    stop: Annotated[
        str | list[str] | None, about("up to 32 strings that end the text, and are cut off it")
    ] = None
    text: Annotated[
        TextOptions | None,
        about("format: text, json_object or json_schema; verbosity has no effect"),
    ] = None
    reasoning: Annotated[
        Reasoning | None,
        about(
            "effort, as reasoning_effort of chat completions; the rest has no effect: what the "
            "model thinks comes whole"
        ),
    ] = None
    tools: Annotated[
        list[dict[str, Any]] | None, about("functions that the model may call; no other type")
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, about("none, auto, required, or a function by its name")
    ] = None
    parallel_tool_calls: Annotated[bool | None, about("as in chat completions")] = None
    include: Annotated[
        list[str] | None,
        about(f"{LOGPROBS}: log-probabilities; what else it may name is not there to be told"),
    ] = None
    top_logprobs: Annotated[
        Int | None, about("0..20 likeliest tokens at each place, with log-probabilities")
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
        """Raises FieldError for fields that do not go together."""
        if self.prompt_cache_options is not None and self.prompt_cache_options.prewarm:
            refuse("prompt_cache_options.prewarm", "is not done here")
        if self.truncation is not None and self.truncate_prompt_tokens is not None:
            raise FieldError(
                "truncation", "truncation and truncate_prompt_tokens exclude each other"
            )


def as_chat(fields: ResponseFields) -> Json:
    """Fields of chat completions that ask for the same. Raises FieldError."""
    told = LOGPROBS in (fields.include or ()) or fields.top_logprobs
    values: Json = {
        "messages": _messages(fields),
        "max_tokens": fields.max_output_tokens,
        "stop": fields.stop,
        "response_format": _format(fields),
        "reasoning_effort": None if fields.reasoning is None else fields.reasoning.effort,
        "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.tools or ())] or None,
        "tool_choice": _tool_choice(fields),
        "logprobs": True if told else None,
        "top_logprobs": fields.top_logprobs,
    }
    if fields.truncation == "auto":
        values["truncate_prompt_tokens"] = -1
    return values


def _messages(fields: ResponseFields) -> list[Json]:
    turns = Turns()
    if fields.instructions:
        turns.say("system", fields.instructions)
    if isinstance(fields.input, str):
        turns.say("user", fields.input)
    elif not fields.input:
        raise FieldError("input", "input has to be a string or a list of items, not empty")
    else:
        for i, item in enumerate(fields.input):
            _add_item(turns, item, f"input[{i}]")
    if not turns.messages:
        raise FieldError("input", "input has nothing that is said")
    return turns.messages


def _format(fields: ResponseFields) -> Json | None:
    """The text's form as chat completions nest it."""
    given = None if fields.text is None else fields.text.format
    if given is None or given.get("type") != "json_schema":
        return given
    schema = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _tool_choice(fields: ResponseFields) -> str | Json | None:
    """The choice as chat completions nest it."""
    given = fields.tool_choice
    if not isinstance(given, dict):
        return given
    if given.get("type") != "function":
        unknown_type(given, "tool_choice", ("function",))
    name = string(given, "name", "tool_choice")
    return {"type": "function", "function": {"name": name}}


def _tool(tool: Json, where: str) -> Json:
    """A function as chat completions nest it."""
    if tool.get("type") != "function":
        unknown_type(tool, where, ("function",))
    names = ("name", "description", "parameters", "strict")
    string(tool, "name", where)
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _add_item(turns: Turns, item: Json, where: str) -> None:
    """An item of the input as a turn, or a part of one."""
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
        case "function_call":
            call_id, name = (string(item, one, where) for one in ("call_id", "name"))
            turns.call(call_id, name, string(item, "arguments", where))
        case "function_call_output":
            text = text_of(item.get("output"), f"{where}.output", TEXTS)
            turns.result(string(item, "call_id", where), text)
        case "reasoning":
            parts = listed(item.get("content") or [], f"{where}.content")
            if parts:
                turns.think(text_of(parts, f"{where}.content", ("reasoning_text",)))
        case _:
            unknown_type(item, where, ITEMS)
