"""POST /v1/responses, /v1/responses/input_tokens and /v1/responses/compact (OpenAI)."""

from typing import Any

from aiohttp import web

from gllm.frontend.answer import send_answer, send_whole_answer
from gllm.frontend.compaction import SUMMARY_PROMPT, CompactionWriter
from gllm.frontend.context import CONTEXT, REQUEST_ID
from gllm.frontend.converted_chat import count_prompt_tokens, prepare_converted_chat
from gllm.frontend.fields.response_items import convert_input
from gllm.frontend.fields.responses import (
    CLIENT_FIELD_NAMES,
    CompactFields,
    InputTokensFields,
    ResponsesFields,
    convert_prompt_to_chat,
    convert_responses_to_chat,
)
from gllm.frontend.json_encoding import json_response
from gllm.frontend.response_schemas import InputTokensResponse
from gllm.frontend.responses_writer import ResponsesWriter


async def create_response(request: web.Request) -> web.StreamResponse:
    """Generate an answer to the input, in the format of OpenAI's Responses API."""
    context = request.app[CONTEXT]
    async with prepare_converted_chat(
        request, ResponsesFields, convert_responses_to_chat, CLIENT_FIELD_NAMES
    ) as (
        fields,
        job,
    ):
        writer = ResponsesWriter(context.engine, job, fields, request[REQUEST_ID])
        return await send_answer(request, context, job, writer)


async def count_input_tokens(request: web.Request) -> web.Response:
    """Count the tokens of an input."""
    num_tokens = await count_prompt_tokens(
        request, InputTokensFields, convert_prompt_to_chat, CLIENT_FIELD_NAMES
    )
    return json_response(
        InputTokensResponse(object="response.input_tokens", input_tokens=num_tokens)
    )


async def compact_conversation(request: web.Request) -> web.StreamResponse:
    """Compact a conversation to the user's messages and a summary by the model."""
    context = request.app[CONTEXT]
    async with prepare_converted_chat(
        request, CompactFields, _summary_fields, CLIENT_FIELD_NAMES
    ) as (
        _,
        job,
    ):
        writer = CompactionWriter(job, request[REQUEST_ID])
        return await send_whole_answer(request, context, job, writer)


def _summary_fields(fields: CompactFields) -> dict[str, Any]:
    """Return the fields of the chat completion that summarizes the conversation."""
    messages = convert_input(fields.input, fields.instructions)
    return {"messages": [*messages, {"role": "user", "content": SUMMARY_PROMPT}]}
