"""POST /v1/messages and POST /v1/messages/count_prompt_tokens.

Owns that errors have what Anthropic's clients look for. Knows nothing of shapes otherwise.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from gllm.frontend.answer import send_answer
from gllm.frontend.context import CONTEXT, REQUEST_ID
from gllm.frontend.converted_chat import count_prompt_tokens, prepare_converted_chat
from gllm.frontend.errors import to_api_error
from gllm.frontend.fields.messages import (
    FIELD_NAMES,
    CountTokensFields,
    MessagesFields,
    convert_to_chat,
)
from gllm.frontend.messages_writer import MessagesWriter


async def create_message(request: web.Request) -> web.StreamResponse:
    """An answer to the messages, in the shape of Anthropic's Messages API."""
    context = request.app[CONTEXT]
    with _errors_of_its_own():
        async with prepare_converted_chat(
            request, MessagesFields, convert_to_chat, FIELD_NAMES
        ) as (_, job):
            writer = MessagesWriter(context.engine, job, request[REQUEST_ID])
            return await send_answer(request, context, job, writer)


async def count_message_tokens(request: web.Request) -> web.StreamResponse:
    """How many tokens the messages are."""
    with _errors_of_its_own():
        num_tokens = await count_prompt_tokens(
            request, CountTokensFields, convert_to_chat, FIELD_NAMES
        )
        return web.json_response({"input_tokens": num_tokens})


@contextmanager
def _errors_of_its_own() -> Iterator[None]:
    """Errors have the `type` and, for a prompt that is too long, the words that this API's clients
    look for."""
    try:
        yield
    except ConnectionError:
        raise  # the client is gone: nobody reads an answer
    except Exception as error:
        told = to_api_error(error)
        if told.code == "context_length_exceeded":
            told.message = f"prompt is too long: {told.message}"
        told.besides = {"type": "error"}
        raise told from error
