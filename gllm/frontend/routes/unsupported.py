"""Endpoints that OpenAI's API or vLLM has and this server does not implement.

They answer 501 with a reason. A 404 would suggest to a client that the URL is wrong.
"""

from aiohttp import web

from gllm.frontend.endpoint import Endpoint, find_endpoint
from gllm.frontend.errors import ApiError

SCORING_REASON = "the model generates text and has no scoring head"
LORA_REASON = (
    "LoRA adapters are not supported; merge the adapter into the weights and serve the result"
)
MEDIA_REASON = "the model reads and writes text only"
STORAGE_REASON = "this server stores nothing"

UNSUPPORTED_REASONS = {
    ("POST", "/score"): SCORING_REASON,
    ("POST", "/v1/score"): SCORING_REASON,
    ("POST", "/rerank"): SCORING_REASON,
    ("POST", "/v1/rerank"): SCORING_REASON,
    ("POST", "/v2/rerank"): SCORING_REASON,
    ("POST", "/classify"): SCORING_REASON,
    ("POST", "/pooling"): "only /v1/embeddings, the pooling of the last token, is supported",
    ("POST", "/v1/load_lora_adapter"): LORA_REASON,
    ("POST", "/v1/unload_lora_adapter"): LORA_REASON,
    ("POST", "/v1/audio/speech"): MEDIA_REASON,
    ("POST", "/v1/audio/transcriptions"): MEDIA_REASON,
    ("POST", "/v1/audio/translations"): MEDIA_REASON,
    ("POST", "/v1/images/generations"): MEDIA_REASON,
    ("POST", "/v1/moderations"): "the model does not classify texts",
    ("POST", "/v1/files"): STORAGE_REASON,
    ("GET", "/v1/files"): STORAGE_REASON,
    ("POST", "/v1/batches"): STORAGE_REASON,
    ("GET", "/v1/batches"): STORAGE_REASON,
}
"""Reason for each method and path."""


async def _refuse(request: web.Request) -> web.Response:
    """Answer 501 with the endpoint's reason."""
    endpoint = find_endpoint(request)
    assert endpoint is not None
    message = f"{endpoint.path} is not implemented: {endpoint.unsupported_reason}."
    raise ApiError(501, message, code="not_implemented")


UNSUPPORTED_ENDPOINTS = tuple(
    Endpoint(method, path, _refuse, unsupported_reason=reason)
    for (method, path), reason in UNSUPPORTED_REASONS.items()
)
