"""POST /v1/messages and POST /v1/messages/count_tokens (Anthropic's Messages API)."""

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from gllm.frontend.answer import send_answer
from gllm.frontend.context import CONTEXT, REQUEST_ID
from gllm.frontend.converted_chat import count_prompt_tokens, prepare_converted_chat
from gllm.frontend.errors import to_api_error
from gllm.frontend.fields.messages import (
    CLIENT_FIELD_NAMES,
    CountTokensFields,
    MessagesFields,
    convert_messages_to_chat,
)
from gllm.frontend.json_encoding import json_response
from gllm.frontend.messages_writer import MessagesWriter
from gllm.frontend.response_schemas import CountTokensResponse


async def create_message(request: web.Request) -> web.StreamResponse:
    """Generate the assistant's next message, in the format of Anthropic's Messages API."""
    context = request.app[CONTEXT]
    with _convert_errors():
        async with prepare_converted_chat(
            request, MessagesFields, convert_messages_to_chat, CLIENT_FIELD_NAMES
        ) as (_, job):
            writer = MessagesWriter(context.engine, job, request[REQUEST_ID])
            return await send_answer(request, context, job, writer)


async def count_message_tokens(request: web.Request) -> web.StreamResponse:
    """Count the tokens of a prompt."""
    with _convert_errors():
        num_tokens = await count_prompt_tokens(
            request, CountTokensFields, convert_messages_to_chat, CLIENT_FIELD_NAMES
        )
        return json_response(CountTokensResponse(input_tokens=num_tokens))


@contextmanager
def _convert_errors() -> Iterator[None]:
    """Convert errors to the format of Anthropic's API.

    Its clients expect `"type": "error"`, and recognize a prompt that is too long by its message.
    """
    try:
        yield
    except ConnectionError:
        raise  # The client has disconnected.
    except Exception as error:
        api_error = to_api_error(error)
        if api_error.code == "context_length_exceeded":
            api_error.message = f"prompt is too long: {api_error.message}"
        api_error.extra_fields = {"type": "error"}
        raise api_error from error
