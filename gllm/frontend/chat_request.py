"""Prepare chat requests for the engine, for every endpoint with messages."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from aiohttp import web

from gllm.engine.chat import PreparedChat, prepare_chat
from gllm.frontend.context import CONTEXT, WARNINGS, ServerContext
from gllm.frontend.fields.base import ModelRequestFields, Warn
from gllm.frontend.fields.chat import ChatCompletionFields
from gllm.frontend.fields.generation import SamplingFields, to_sampling_params
from gllm.frontend.fields.parsing import (
    parse_fields,
    read_fields,
    rename_error_fields,
    run_off_loop,
)
from gllm.frontend.request_run import PreparedRequest
from gllm.text.chat.output_parser import create_reasoning_counter_factory
from gllm.text.chat.prompt import ChatRequest, render_chat
from gllm.text.chat.tools import parse_functions, parse_tools

Fields = TypeVar("Fields", bound=ModelRequestFields)
Conversion = Callable[[Fields, Warn], Mapping[str, Any]]
"""Function that converts the body of another API to the fields of a chat completion request. It
warns of each part that has no effect."""


async def prepare_chat_request(
    context: ServerContext, fields: ChatCompletionFields
) -> PreparedRequest:
    """Render the chat template of a chat completion request, tokenize it and check all parameters.

    Raises:
        FieldError: A field is invalid.
    """
    model, tokenizer = context.engine.model, context.engine.tokenizer
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    params = to_sampling_params(fields, context, logprobs=logprobs)

    def prepare() -> PreparedChat:
        request = to_chat_request(fields)
        return prepare_chat(request, params, model, tokenizer, context.config.output_parsers)

    # Long prompts and large schemas take time: not on the event loop.
    chat = await asyncio.to_thread(prepare)
    return PreparedRequest(
        fields,
        [chat.token_ids],
        chat.params,
        output_format=chat.output_format,
        new_reasoning_counter=create_reasoning_counter_factory(tokenizer, chat.output_format),
    )


def to_chat_request(fields: ChatCompletionFields) -> ChatRequest:
    """Convert the body of a chat completion request to the input of the chat template.

    Raises:
        FieldError: A field is invalid.
    """
    variables = {
        name: value
        for name, value in (fields.chat_template_kwargs or {}).items()
        if value is not None
    }
    if fields.functions or fields.function_call not in (None, "none", "auto"):
        tool_options = parse_functions(fields.functions, fields.function_call)
    else:
        tool_options = replace(
            parse_tools(fields.tools, fields.tool_choice),
            is_single_call=fields.parallel_tool_calls is False,
        )
    return ChatRequest(
        messages=fields.messages,
        tool_options=tool_options,
        template_variables=variables,
        reasoning_effort=fields.reasoning_effort,
        add_generation_prompt=fields.add_generation_prompt is not False,
        continue_final_message=bool(fields.continue_final_message),
        parse_special=bool(fields.parse_special),
    )


async def read_converted_chat(
    request: web.Request,
    schema: type[Fields],
    as_chat: Conversion[Fields],
    names: Mapping[str, str],
) -> tuple[Fields, ChatCompletionFields]:
    """Return the body of a Messages or Responses API request, and its chat completion.

    The answer gets the warnings of the conversion as a header. Arguments and errors are those of
    `prepare_converted_chat`.
    """
    fields = await read_fields(request, schema)
    request.app[CONTEXT].check_model(fields.model)
    warnings: list[str] = []
    request[WARNINGS] = warnings

    def convert() -> ChatCompletionFields:
        return to_chat_fields(fields, as_chat(fields, warnings.append), names)

    if fields.refers_to_stored:
        return fields, await asyncio.to_thread(convert)
    return fields, await run_off_loop(request, convert)


@asynccontextmanager
async def prepare_converted_chat(
    request: web.Request,
    schema: type[Fields],
    as_chat: Conversion[Fields],
    names: Mapping[str, str],
) -> AsyncIterator[tuple[Fields, PreparedRequest]]:
    """Convert a Messages or Responses API request to a chat completion, and prepare it to run.

    A context manager that yields the parsed request body and the prepared request. Within the block
    the request counts towards the limit on queued requests.

    Args:
        request: The HTTP request.
        schema: Class of the API's request body.
        as_chat: Converts the parsed body to the fields of a chat completion request.
        names: Map from field names of chat completions to this API's names, for error messages.

    Raises:
        FieldError: A field is invalid.
        ApiError: The named model is not served, or the body is no JSON object.
        EngineUnavailableError: The engine accepts no requests, or too many are queued.
    """
    context = request.app[CONTEXT]
    fields, chat = await read_converted_chat(request, schema, as_chat, names)
    with context.admit(), rename_error_fields(names):
        yield fields, await prepare_chat_request(context, chat)


async def count_prompt_tokens(
    request: web.Request,
    schema: type[Fields],
    as_chat: Conversion[Fields],
    names: Mapping[str, str],
) -> int:
    """Return the number of prompt tokens of a Messages or Responses API request.

    The request is not run. Arguments and errors are those of `prepare_converted_chat`.
    """
    context = request.app[CONTEXT]
    _, chat = await read_converted_chat(request, schema, as_chat, names)
    context.check_accepting()
    tokenizer, parsers = context.engine.tokenizer, context.config.output_parsers
    with rename_error_fields(names):
        prompt = await asyncio.to_thread(
            lambda: render_chat(tokenizer, to_chat_request(chat), parsers)
        )
    return len(prompt.token_ids)


def to_chat_fields(
    fields: object, values: Mapping[str, Any], names: Mapping[str, str]
) -> ChatCompletionFields:
    """Build the fields of a chat completion request from a request of another API.

    Args:
        fields: Parsed body of the other API's request; its sampling fields are copied.
        values: The remaining fields of the chat completion request, by name.
        names: Map from field names of chat completions to the other API's names, for error
            messages.

    Raises:
        FieldError: A value is invalid; the error names the field that the client sent.
    """
    sampling = {name: getattr(fields, name, None) for name in SamplingFields.__struct_fields__}
    present = {name: value for name, value in {**sampling, **values}.items() if value is not None}
    with rename_error_fields(names):
        return parse_fields(present, ChatCompletionFields)
