"""GET /server_info."""

import dataclasses
from typing import Any

import msgspec
from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.frontend.context import CONTEXT
from gllm.options.version import __version__


async def get_server_info(request: web.Request) -> web.Response:
    """Return the configuration of the server, its engine and its model, without secrets."""
    context = request.app[CONTEXT]
    model, status = context.engine.model, context.engine.status()
    info = {
        "version": __version__,
        # The next lines are SGLang's names, from which its routers read what they serve.
        "model_path": model.root or model.name,
        "served_model_name": model.name,
        "tp_size": 1,
        "dp_size": 1,
        "max_model_len": model.max_model_len,
        "max_total_num_tokens": status.num_kv_blocks * status.block_size,
        "page_size": status.block_size,
        "disaggregation_mode": "null",
        "model": msgspec.to_builtins(model),
        "engine": context.engine.describe(),
        "server": _public_options(context.config),
    }
    return web.json_response(info)


def _public_options(config: ServerConfig) -> dict[str, Any]:
    """Return the options of a configuration that are not secret."""
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if not field.metadata.get("secret")
    }
