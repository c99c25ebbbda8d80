"""POST /v1/responses, /v1/responses/input_tokens and /v1/responses/compact."""

import asyncio
from typing import Any

from aiohttp import web

from gllm.frontend.answer import answer, answer_whole
from gllm.frontend.chat_job import chat_job, chat_prompt
from gllm.frontend.compaction import REQUEST, CompactionWriter
from gllm.frontend.context import CONTEXT, REQUEST_ID
from gllm.frontend.fields.as_chat import chat_fields, named
from gllm.frontend.fields.chat import ChatFields
from gllm.frontend.fields.reading import off_loop, read_fields
from gllm.frontend.fields.response_items import convert_input
from gllm.frontend.fields.responses import (
    NAMES,
    CompactFields,
    InputTokensFields,
    ResponseFields,
    as_chat,
    prompt_fields,
)
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


async def count(request: web.Request) -> web.Response:
    """How many tokens the input is."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, InputTokensFields)
    context.check_ready()
    context.check_model(fields.model)
    chat = await off_loop(request, _counted, fields)
    with named(NAMES):
        prompt = await asyncio.to_thread(
            chat_prompt, context.engine.tokenizer, chat, context.config
        )
    counted = {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}
    return web.json_response(counted)


async def compact(request: web.Request) -> web.StreamResponse:
    """A shorter input that stands for the conversation: the user's messages and a summary."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, CompactFields)
    context.check_model(fields.model)
    messages, chat = await off_loop(request, _compacting, fields)
    with context.admit(), named(NAMES):
        job = await chat_job(context, chat)
        writer = CompactionWriter(job, messages, request[REQUEST_ID])
        return await answer_whole(request, context, job, writer)


def _counted(fields: InputTokensFields) -> ChatFields:
    return chat_fields(fields, prompt_fields(fields), NAMES)


def _compacting(fields: CompactFields) -> tuple[list[dict[str, Any]], ChatFields]:
    messages = convert_input(fields.input, fields.instructions)
    asked = [*messages, {"role": "user", "content": REQUEST}]
    return messages, chat_fields(fields, {"messages": asked}, NAMES)
