"""Endpoints that OpenAI's API or vLLM has and this server does not implement.

They answer 501 with a reason. A 404 would suggest to a client that the URL is wrong.
"""

from aiohttp import web

from gllm.frontend.endpoint import Endpoint, find_endpoint
from gllm.frontend.errors import ApiError

UNSUPPORTED_ENDPOINT_NAMES = {
    "the model generates text and has no scoring head": (
        "POST /score, POST /v1/score, POST /rerank, POST /v1/rerank, POST /v2/rerank, "
        "POST /classify"
    ),
    "only /v1/embeddings, the pooling of the last token, is supported": "POST /pooling",
    "LoRA adapters are not supported; merge the adapter into the weights and serve the result": (
        "POST /v1/load_lora_adapter, POST /v1/unload_lora_adapter"
    ),
    "the model reads and writes text only": (
        "POST /v1/audio/speech, POST /v1/audio/transcriptions, POST /v1/audio/translations, "
        "POST /v1/images/generations"
    ),
    "the model does not classify texts": "POST /v1/moderations",
    "this server stores no files": (
        "POST /v1/files, GET /v1/files, POST /v1/batches, GET /v1/batches"
    ),
}
"""Methods and paths by the reason why they are not implemented."""


async def _refuse(request: web.Request) -> web.Response:
    """Answer 501 with the endpoint's reason."""
    endpoint = find_endpoint(request)
    assert endpoint is not None
    message = f"{endpoint.path} is not implemented: {endpoint.unsupported_reason}."
    raise ApiError(501, message, code="not_implemented")


UNSUPPORTED_ENDPOINTS = tuple(
    Endpoint(method, path, _refuse, unsupported_reason=reason)
    for reason, names in UNSUPPORTED_ENDPOINT_NAMES.items()
    for method, path in map(str.split, names.split(", "))
)
