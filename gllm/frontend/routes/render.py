"""POST /v1/chat/completions/render and POST /v1/completions/render: prompts as token ids.

An answer is the body of a request to /inference/v1/generate, or a list of them. Routers use the
token ids to select a server by its cached prefixes.
"""

import asyncio

import msgspec
from aiohttp import web

from gllm.frontend.chat_request import prepare_chat_request
from gllm.frontend.context import CONTEXT, REQUEST_ID, ServerContext
from gllm.frontend.fields.chat import ChatCompletionFields
from gllm.frontend.fields.completions import CompletionFields
from gllm.frontend.fields.generation import BaseCompletionFields
from gllm.frontend.fields.parsing import read_fields
from gllm.frontend.fields.token_generation import sampling_params_to_json
from gllm.frontend.json_encoding import encode_json_in_pieces
from gllm.frontend.request_run import PreparedRequest
from gllm.frontend.response_schemas import RenderedRequest
from gllm.frontend.routes.chat import CHAT_ID_PREFIX
from gllm.frontend.routes.completions import (
    COMPLETION_ID_PREFIX,
    parse_completion,
    prepare_prompts,
)


async def render_chat_completion(request: web.Request) -> web.Response:
    """Return prompt token ids and sampling parameters of a chat completion, without running it."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, ChatCompletionFields)
    context.check_model(fields.model)
    prepared = await prepare_chat_request(context, fields)
    (rendered,) = _render(request, context, fields, prepared, CHAT_ID_PREFIX)
    return await _json_response(rendered)


async def render_completion(request: web.Request) -> web.Response:
    """Return token ids and sampling parameters per prompt of a completion, without running it."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, CompletionFields)
    context.check_model(fields.model)
    texts, params = parse_completion(fields, context)
    prompts = await asyncio.to_thread(prepare_prompts, context.engine, texts, params, False)
    prepared = PreparedRequest(fields, [prompt.token_ids for prompt in prompts], params)
    return await _json_response(_render(request, context, fields, prepared, COMPLETION_ID_PREFIX))


def _render(
    request: web.Request,
    context: ServerContext,
    fields: BaseCompletionFields,
    prepared: PreparedRequest,
    prefix: str,
) -> list[RenderedRequest]:
    """Return a request to /inference/v1/generate per prompt."""
    model = context.engine.model
    request_id = f"{prefix}{fields.request_id or request[REQUEST_ID]}"
    options, params = fields.stream_options, prepared.params
    return [
        RenderedRequest(
            request_id=request_id if index == 0 else f"{request_id}-{index}",
            token_ids=token_ids,
            features=None,
            sampling_params=sampling_params_to_json(params, model.max_model_len - len(token_ids)),
            model=model.name,
            stream=bool(fields.stream),
            stream_options=None if options is None else msgspec.structs.asdict(options),
            cache_salt=fields.cache_salt,
            priority=fields.priority or 0,
            kv_transfer_params=None,
        )
        for index, token_ids in enumerate(prepared.prompts)
    ]


async def _json_response(value: RenderedRequest | list[RenderedRequest]) -> web.Response:
    """Return a response with a value, encoded in a thread because prompts may be long."""
    body = await asyncio.to_thread(encode_json_in_pieces, value)
    return web.Response(body=body, content_type="application/json")
