"""POST /v1/embeddings."""

import asyncio
import base64
import math
from array import array
from functools import partial

from aiohttp import web

from gllm.config.sampling import SamplingParams
from gllm.engine.interface import EngineInterface
from gllm.engine.request_checks import check_request, encode_prompt
from gllm.frontend.context import CONTEXT, REQUEST_ID
from gllm.frontend.fields.completions import EmbeddingFields, parse_prompts
from gllm.frontend.fields.parsing import read_fields
from gllm.frontend.json_encoding import encode_json_in_pieces
from gllm.frontend.response_schemas import EmbeddingData, EmbeddingsResponse, EmbeddingUsage
from gllm.options.field_types import FieldError
from gllm.options.limits import MAX_PROMPTS


async def create_embeddings(request: web.Request) -> web.Response:
    """Return the embedding of each text: the normalized last hidden state of its last token.

    Of a model with bidirectional attention it is the mean over the text, after its dense layers.
    """
    context = request.app[CONTEXT]
    fields = await read_fields(request, EmbeddingFields)
    context.check_model(fields.model)
    engine = context.engine
    max_prompts = min(MAX_PROMPTS, context.config.max_num_queued_requests)
    texts = parse_prompts(fields.input, max_prompts, param="input")
    with context.admit(len(texts)):
        prompts = await asyncio.to_thread(_encode_prompts, engine, texts)
        vectors = await _embed_prompts(engine, prompts, fields, request[REQUEST_ID])
    body = await asyncio.to_thread(_embeddings_body, vectors, prompts, fields, engine.model.name)
    return web.Response(body=body, content_type="application/json")


def _embeddings_body(
    vectors: list[list[float]], prompts: list[list[int]], fields: EmbeddingFields, model: str
) -> bytes:
    """Return the body of the answer. Raises FieldError."""
    data = [
        EmbeddingData(object="embedding", index=index, embedding=_format_embedding(vector, fields))
        for index, vector in enumerate(vectors)
    ]
    num_tokens = sum(map(len, prompts))
    usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    return encode_json_in_pieces(
        EmbeddingsResponse(object="list", data=data, model=model, usage=usage)
    )


def _encode_prompts(engine: EngineInterface, texts: list[str] | list[list[int]]) -> list[list[int]]:
    """Return the token ids of each text. Raises FieldError."""
    prompts, params = [], SamplingParams()
    for text in texts:
        token_ids = text
        if isinstance(token_ids, str):
            token_ids = encode_prompt(token_ids, params, engine.model, engine.tokenizer, "input")
        check_request(token_ids, params, engine.model, param="input")
        prompts.append(token_ids)
    return prompts


async def _embed_prompts(
    engine: EngineInterface, prompts: list[list[int]], fields: EmbeddingFields, request_id: str
) -> list[list[float]]:
    """Return the embedding of each prompt, before it is normalized.

    If one prompt fails or the client disconnects, the others are aborted.

    Raises:
        EmbeddingError: The engine failed to compute an embedding.
    """
    embed = partial(
        engine.embed,
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
        request_id=request_id,
    )
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(embed(prompt)) for prompt in prompts]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _format_embedding(vector: list[float], fields: EmbeddingFields) -> list[float] | str:
    """Return the leading components of a vector, scaled to length 1.

    They are numbers, or base64 of float32 numbers. Raises FieldError.
    """
    dimensions = fields.dimensions
    if dimensions is not None and dimensions > len(vector):
        message = (
            f"dimensions is {dimensions}, but has to be at most {len(vector)}, the size of the "
            "model's embeddings"
        )
        raise FieldError("dimensions", message)
    components = vector[:dimensions]
    length = math.hypot(*components) or 1.0
    normalized = [component / length for component in components]
    if fields.encoding_format == "base64":
        return base64.b64encode(array("f", normalized).tobytes()).decode()
    return normalized
