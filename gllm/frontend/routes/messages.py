"""POST /v1/messages and POST /v1/messages/count_tokens.

Owns that errors have what Anthropic's clients look for. Knows nothing of shapes otherwise.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from gllm.frontend.answer import answer
from gllm.frontend.context import CONTEXT, REQUEST_ID
from gllm.frontend.converted_chat import converted_job, count_tokens
from gllm.frontend.errors import to_api_error
from gllm.frontend.fields.messages import NAMES, CountTokensFields, MessagesFields, as_chat
from gllm.frontend.message_writer import MessageWriter


async def create_message(request: web.Request) -> web.StreamResponse:
    """An answer to the messages, in the shape of Anthropic's Messages API."""
    context = request.app[CONTEXT]
    with _errors_of_its_own():
        async with converted_job(request, MessagesFields, as_chat, NAMES) as (_, job):
            writer = MessageWriter(context.engine, job, request[REQUEST_ID])
            return await answer(request, context, job, writer)


async def count_message_tokens(request: web.Request) -> web.StreamResponse:
    """How many tokens the messages are."""
    with _errors_of_its_own():
        num_tokens = await count_tokens(request, CountTokensFields, as_chat, NAMES)
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
