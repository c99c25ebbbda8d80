"""POST /v1/embeddings.

Owns the endpoint's shape, and that vectors have length 1. Knows nothing of how they are computed.
"""

import asyncio
import base64
import math
from array import array
from functools import partial

from aiohttp import web

from gllm.config.field_types import FieldError
from gllm.config.limits import MAX_PROMPTS
from gllm.config.sampling import SamplingParams
from gllm.engine.interface import EmbeddingError, EngineInterface, check_request, encode_prompt
from gllm.frontend.context import CONTEXT, REQUEST_ID
from gllm.frontend.errors import ApiError
from gllm.frontend.fields.completions import parse_prompts
from gllm.frontend.fields.embeddings import EmbeddingFields
from gllm.frontend.fields.parsing import read_fields
from gllm.frontend.json_encoding import encode_json_in_pieces


async def create_embeddings(request: web.Request) -> web.Response:
    """What the model knows at the last token of each text, as a vector of length 1."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, EmbeddingFields)
    context.check_model(fields.model)
    engine = context.engine
    most = min(MAX_PROMPTS, context.config.max_num_queued_requests)
    texts = parse_prompts(fields.input, most, param="input")
    with context.admit(len(texts)):
        prompts = await asyncio.to_thread(_ids, engine, texts)
        vectors = await _all(engine, prompts, fields, request[REQUEST_ID])
    body = await asyncio.to_thread(_body, vectors, prompts, fields, engine.model.name)
    return web.Response(body=body, content_type="application/json")


def _body(
    vectors: list[list[float]], prompts: list[list[int]], fields: EmbeddingFields, model: str
) -> bytes:
    """The answer. Raises FieldError."""
    data = [
        {"object": "embedding", "index": index, "embedding": _written(vector, fields)}
        for index, vector in enumerate(vectors)
    ]
    tokens = sum(map(len, prompts))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return encode_json_in_pieces({"object": "list", "data": data, "model": model, "usage": usage})


def _ids(engine: EngineInterface, texts: list[str] | list[list[int]]) -> list[list[int]]:
    """Checked prompts as token ids. Raises FieldError."""
    prompts, params = [], SamplingParams()
    for text in texts:
        ids = text
        if isinstance(ids, str):
            ids = encode_prompt(ids, params, engine.model, engine.tokenizer, "input")
        check_request(ids, params, engine.model, param="input")
        prompts.append(ids)
    return prompts


async def _all(
    engine: EngineInterface, prompts: list[list[int]], fields: EmbeddingFields, request_id: str
) -> list[list[float]]:
    """The vectors of all prompts; if one fails, or the client leaves, the others are aborted."""
    embed = partial(
        engine.embed,
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
        request_id=request_id,
    )
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(embed(prompt)) for prompt in prompts]
    except ExceptionGroup as failed:
        error = failed.exceptions[0]
        if isinstance(error, EmbeddingError):
            raise ApiError(500, str(error), code="embedding_failed") from error
        raise error from None
    return [task.result() for task in tasks]


def _scaled(vector: list[float], dimensions: int | None) -> list[float]:
    """Its first numbers, scaled to length 1. Raises FieldError."""
    if dimensions is not None and dimensions > len(vector):
        raise FieldError(
            "dimensions", f"dimensions is {dimensions}, but this model has {len(vector)}"
        )
    kept = vector[:dimensions]
    length = math.hypot(*kept) or 1.0
    return [number / length for number in kept]


def _written(vector: list[float], fields: EmbeddingFields) -> list[float] | str:
    vector = _scaled(vector, fields.dimensions)
    if fields.encoding_format == "base64":
        return base64.b64encode(array("f", vector).tobytes()).decode()
    return vector
