"""Endpoints that OpenAI's API or vLLM has and this server does not implement.

They answer 501 with a reason. A 404 would suggest to a client that the URL is wrong.
"""

from aiohttp import web

from gllm.frontend.endpoint import Endpoint, endpoint_of
from gllm.frontend.errors import ApiError

SCORES = "the served models generate text and have no scoring head"
SLEEP = "weights stay in memory for as long as the server runs: stop the server to free it"
LORA = "LoRA adapters are not loaded: merge the adapter into the model's weights and serve those"
AUDIO = "the served models read and write text only"
STORE = "nothing is stored on this server"

REASONS = {
    ("POST", "/score"): SCORES,
    ("POST", "/v1/score"): SCORES,
    ("POST", "/rerank"): SCORES,
    ("POST", "/v1/rerank"): SCORES,
    ("POST", "/v2/rerank"): SCORES,
    ("POST", "/classify"): SCORES,
    ("POST", "/pooling"): "vectors of texts are at /v1/embeddings, other poolings are not computed",
    ("POST", "/sleep"): SLEEP,
    ("POST", "/wake_up"): SLEEP,
    ("GET", "/is_sleeping"): SLEEP,
    ("POST", "/v1/load_lora_adapter"): LORA,
    ("POST", "/v1/unload_lora_adapter"): LORA,
    ("POST", "/v1/audio/speech"): AUDIO,
    ("POST", "/v1/audio/transcriptions"): AUDIO,
    ("POST", "/v1/audio/translations"): AUDIO,
    ("POST", "/v1/images/generations"): AUDIO,
    ("POST", "/v1/moderations"): "the served models do not classify texts",
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
