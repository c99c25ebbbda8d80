"""Endpoints of other servers that this one does not have: 501 with the reason.

A client that probes for them learns that the path is right and the feature is missing, which 404
does not say.
"""

from collections.abc import Iterator

from aiohttp import web

from gllm.frontend.endpoint import Endpoint
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


def endpoints() -> Iterator[Endpoint]:
    """Return an endpoint for each path of the table."""
    for (method, path), why in REASONS.items():
        yield Endpoint(method, path, _refuse, reason=why)


async def _refuse(request: web.Request) -> web.Response:
    """Not implemented."""
    resource = request.match_info.route.resource
    path = "" if resource is None else resource.canonical
    method = "GET" if request.method == "HEAD" else request.method
    why = REASONS[method, path]
    raise ApiError(501, f"{path} is not implemented: {why}.", code="not_implemented")
