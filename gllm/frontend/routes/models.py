"""GET /v1/models and /v1/models/{id}.

Owns how a model is described. Knows nothing of files and weights.
"""

from aiohttp import web

from gllm.engine.interface import ModelInfo
from gllm.frontend.context import CONTEXT


async def list_models(request: web.Request) -> web.Response:
    """The one model that is served."""
    model = request.app[CONTEXT].engine.model
    return web.json_response({"object": "list", "data": [_described(model)]})


async def get_model(request: web.Request) -> web.Response:
    """A model by its name."""
    context = request.app[CONTEXT]
    context.check_model(request.match_info["model"])
    return web.json_response(_described(context.engine.model))


def _described(model: ModelInfo) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "gllm",
        "max_model_len": model.max_model_len,
        "vocab_size": model.vocab_size,
    }
