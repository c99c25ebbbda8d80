"""Endpoints that OpenAI's API or vLLM has and this server does not implement.

They answer 501 with a reason. A 404 would suggest to a client that the URL is wrong.
"""

from aiohttp import web

from gllm.frontend.endpoint import Endpoint, endpoint_of
from gllm.frontend.errors import ApiError

SCORES = "the model generates text and has no scoring head"
SLEEP = "the weights stay in memory while the server runs; stop the server to free the memory"
LORA = "LoRA adapters are not supported; merge the adapter into the weights and serve the result"
AUDIO = "the model reads and writes text only"
STORE = "this server stores nothing"

REASONS = {
    ("POST", "/score"): SCORES,
    ("POST", "/v1/score"): SCORES,
    ("POST", "/rerank"): SCORES,
    ("POST", "/v1/rerank"): SCORES,
    ("POST", "/v2/rerank"): SCORES,
    ("POST", "/classify"): SCORES,
    ("POST", "/pooling"): "only /v1/embeddings, the pooling of the last token, is supported",
    ("POST", "/sleep"): SLEEP,
    ("POST", "/wake_up"): SLEEP,
    ("GET", "/is_sleeping"): SLEEP,
    ("POST", "/v1/load_lora_adapter"): LORA,
    ("POST", "/v1/unload_lora_adapter"): LORA,
    ("POST", "/v1/audio/speech"): AUDIO,
    ("POST", "/v1/audio/transcriptions"): AUDIO,
    ("POST", "/v1/audio/translations"): AUDIO,
    ("POST", "/v1/images/generations"): AUDIO,
    ("POST", "/v1/moderations"): "the model does not classify texts",
    ("POST", "/v1/files"): STORE,
    ("GET", "/v1/files"): STORE,
    ("POST", "/v1/batches"): STORE,
    ("GET", "/v1/batches"): STORE,
}
"""Reason for each method and path."""


async def _refuse(request: web.Request) -> web.Response:
    """Answer 501 with the endpoint's reason."""
    endpoint = endpoint_of(request)
    assert endpoint is not None
    message = f"{endpoint.path} is not implemented: {endpoint.unsupported_reason}."
    raise ApiError(501, message, code="not_implemented")


UNSUPPORTED_ENDPOINTS = tuple(
    Endpoint(method, path, _refuse, unsupported_reason=reason)
    for (method, path), reason in REASONS.items()
)
