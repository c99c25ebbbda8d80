"""POST /v1/responses.

Owns nothing but the route. Knows nothing of shapes.
"""

from aiohttp import web

from gllm.frontend.answer import answer
from gllm.frontend.chat_job import chat_job
from gllm.frontend.context import CONTEXT, REQUEST_ID
from gllm.frontend.fields.as_chat import chat_fields, named
from gllm.frontend.fields.chat import ChatFields
from gllm.frontend.fields.reading import off_loop, read_fields
from gllm.frontend.fields.responses import NAMES, ResponseFields, as_chat
from gllm.frontend.response_writer import ResponseWriter


async def create(request: web.Request) -> web.StreamResponse:
    """An answer to the input, in the shape of OpenAI's Responses API."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, ResponseFields)
    context.check_model(fields.model)
    chat = await off_loop(request, _chat, fields)
    with context.admit(), named(NAMES):
        job = await chat_job(context, chat)
        writer = ResponseWriter(context.engine, job, fields, request[REQUEST_ID])
        return await answer(request, context, job, writer)


def _chat(fields: ResponseFields) -> ChatFields:
    return chat_fields(fields, as_chat(fields), NAMES)
