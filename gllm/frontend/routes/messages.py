"""POST /v1/messages and POST /v1/messages/count_tokens.

Owns that errors have what Anthropic's clients look for. Knows nothing of shapes otherwise.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from gllm.frontend.answer import answer
from gllm.frontend.chat_job import chat_job, chat_prompt
from gllm.frontend.context import CONTEXT, REQUEST_ID
from gllm.frontend.errors import to_api_error
from gllm.frontend.fields.as_chat import chat_fields, named
from gllm.frontend.fields.chat import ChatFields
from gllm.frontend.fields.messages import NAMES, CountFields, MessageFields, as_chat
from gllm.frontend.fields.reading import off_loop, read_fields
from gllm.frontend.message_writer import MessageWriter


async def create(request: web.Request) -> web.StreamResponse:
    """An answer to the messages, in the shape of Anthropic's Messages API."""
    context = request.app[CONTEXT]
    with _errors_of_its_own():
        fields = await read_fields(request, MessageFields)
        context.check_model(fields.model)
        chat = await off_loop(request, _chat, fields)
        with context.admit(), named(NAMES):
            job = await chat_job(context, chat)
            writer = MessageWriter(context.engine, job, request[REQUEST_ID])
            return await answer(request, context, job, writer)


def _chat(fields: MessageFields | CountFields) -> ChatFields:
    return chat_fields(fields, as_chat(fields), NAMES)


async def count(request: web.Request) -> web.StreamResponse:
    """How many tokens the messages are."""
    context = request.app[CONTEXT]
    with _errors_of_its_own():
        fields = await read_fields(request, CountFields)
        context.check_ready()
        context.check_model(fields.model)
        chat = await off_loop(request, _chat, fields)
        with named(NAMES):
            prompt = await asyncio.to_thread(
                chat_prompt, context.engine.tokenizer, chat, context.config
            )
        return web.json_response({"input_tokens": len(prompt.ids)})


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
