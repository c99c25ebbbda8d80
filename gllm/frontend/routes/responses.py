"""POST /v1/responses, /v1/responses/input_tokens and /v1/responses/compact."""

from typing import Any

from aiohttp import web

from gllm.frontend.answer import answer, answer_whole
from gllm.frontend.compaction import REQUEST, CompactionWriter
from gllm.frontend.context import CONTEXT, REQUEST_ID
from gllm.frontend.converted_chat import converted_job, count_tokens
from gllm.frontend.fields.response_items import convert_input
from gllm.frontend.fields.responses import (
    NAMES,
    CompactFields,
    InputTokensFields,
    ResponsesFields,
    as_chat,
    prompt_fields,
)
from gllm.frontend.response_writer import ResponseWriter


async def create_response(request: web.Request) -> web.StreamResponse:
    """An answer to the input, in the shape of OpenAI's Responses API."""
    context = request.app[CONTEXT]
    async with converted_job(request, ResponsesFields, as_chat, NAMES) as (fields, job):
        writer = ResponseWriter(context.engine, job, fields, request[REQUEST_ID])
        return await answer(request, context, job, writer)


async def count_input_tokens(request: web.Request) -> web.Response:
    """How many tokens the input is."""
    num_tokens = await count_tokens(request, InputTokensFields, prompt_fields, NAMES)
    return web.json_response({"object": "response.input_tokens", "input_tokens": num_tokens})


async def compact_conversation(request: web.Request) -> web.StreamResponse:
    """A shorter input that stands for the conversation: the user's messages and a summary."""
    context = request.app[CONTEXT]
    async with converted_job(request, CompactFields, _summary_fields, NAMES) as (_, job):
        writer = CompactionWriter(job, request[REQUEST_ID])
        return await answer_whole(request, context, job, writer)


def _summary_fields(fields: CompactFields) -> dict[str, Any]:
    """Return the fields of chat completions that ask for a summary of the conversation."""
    messages = convert_input(fields.input, fields.instructions)
    return {"messages": [*messages, {"role": "user", "content": REQUEST}]}
