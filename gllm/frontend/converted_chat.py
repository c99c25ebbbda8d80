"""Convert requests of other chat APIs to chat completions.

The routes give the schema of a body, its conversion, and the API's names of the converted fields.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiohttp import web

from gllm.frontend.chat_request import chat_request, prepare_chat_request
from gllm.frontend.context import CONTEXT
from gllm.frontend.fields.base import ModelRequestFields
from gllm.frontend.fields.chat_conversion import rename_error_fields, to_chat_fields
from gllm.frontend.fields.parsing import read_fields, run_off_loop
from gllm.frontend.request_run import PreparedRequest
from gllm.text.chat.prompt import render_chat

Fields = TypeVar("Fields", bound=ModelRequestFields)


@asynccontextmanager
async def prepare_converted_chat(
    request: web.Request,
    schema: type[Fields],
    as_chat: Callable[[Fields], Mapping[str, Any]],
    names: Mapping[str, str],
) -> AsyncIterator[tuple[Fields, PreparedRequest]]:
    """Yield a request's fields and the prepared request, which is admitted within the block.

    Args:
        request: The HTTP request.
        schema: Fields of the API's body.
        as_chat: Converts the fields to those of chat completions.
        names: The API's names of the fields of chat completions, for errors.

    Raises:
        FieldError: The request is invalid.
        ApiError: The model is not served.
    """
    context = request.app[CONTEXT]
    fields = await read_fields(request, schema)
    context.check_model(fields.model)
    chat = await run_off_loop(request, lambda: to_chat_fields(fields, as_chat(fields), names))
    with context.admit(), rename_error_fields(names):
        yield fields, await prepare_chat_request(context, chat)


async def count_prompt_tokens(
    request: web.Request,
    schema: type[Fields],
    as_chat: Callable[[Fields], Mapping[str, Any]],
    names: Mapping[str, str],
) -> int:
    """Return the number of tokens of a request's prompt.

    Arguments and errors are those of `prepare_converted_chat`.
    """
    context = request.app[CONTEXT]
    fields = await read_fields(request, schema)
    context.check_accepting()
    context.check_model(fields.model)
    chat = await run_off_loop(request, lambda: to_chat_fields(fields, as_chat(fields), names))
    tokenizer, parsers = context.engine.tokenizer, context.config.output_parsers
    with rename_error_fields(names):
        prompt = await asyncio.to_thread(
            lambda: render_chat(tokenizer, chat_request(chat), parsers)
        )
    return len(prompt.token_ids)
