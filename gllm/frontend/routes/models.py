"""GET /v1/models and GET /v1/models/{model}."""

from aiohttp import web

from gllm.engine.interface import ModelInfo
from gllm.frontend.context import CONTEXT
from gllm.frontend.json_encoding import json_response
from gllm.frontend.server_response_schemas import ModelCard, ModelListResponse


async def list_models(request: web.Request) -> web.Response:
    """Return a list that contains the served model."""
    model = request.app[CONTEXT].engine.model
    return json_response(ModelListResponse(object="list", data=[_model_card(model)]))


async def get_model(request: web.Request) -> web.Response:
    """Return a model by name."""
    context = request.app[CONTEXT]
    context.check_model(request.match_info["model"])
    return json_response(_model_card(context.engine.model))


def _model_card(model: ModelInfo) -> ModelCard:
    return ModelCard(
        id=model.name,
        object="model",
        created=model.created,
        owned_by="gllm",
        root=model.root or model.name,
        parent=None,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
    )
