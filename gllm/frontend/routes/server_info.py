"""GET /server_info."""

import dataclasses
from typing import Any

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.frontend.context import CONTEXT
from gllm.frontend.json_encoding import json_response
from gllm.frontend.server_response_schemas import ServerInfoResponse, disaggregation_mode
from gllm.options.version import __version__


async def get_server_info(request: web.Request) -> web.Response:
    """Return the configuration of the server, its engine and its model, without secrets."""
    context = request.app[CONTEXT]
    engine = context.engine
    model, status = engine.model, engine.status()
    return json_response(
        ServerInfoResponse(
            version=__version__,
            model_path=model.root or model.name,
            served_model_name=model.name,
            tp_size=status.tensor_parallel_size,
            dp_size=1,
            max_model_len=model.max_model_len,
            max_total_num_tokens=status.num_kv_blocks * status.block_size,
            page_size=status.block_size,
            disaggregation_mode=disaggregation_mode(engine.role),
            model=model,
            engine=engine.describe(),
            server=_public_options(context.config),
        )
    )


def _public_options(config: ServerConfig) -> dict[str, Any]:
    """Return the options of a configuration that are not secret."""
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if not field.metadata.get("secret")
    }
