"""GET /server_info and GET /load."""

import dataclasses
from typing import Any

import msgspec
from aiohttp import web

from gllm import __version__
from gllm.config.server import ServerConfig
from gllm.frontend.context import CONTEXT


async def get_server_info(request: web.Request) -> web.Response:
    """Return the configuration of the server, its engine and its model, without secrets."""
    context = request.app[CONTEXT]
    info = {
        "version": __version__,
        "model": msgspec.to_builtins(context.engine.model),
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


async def get_load(request: web.Request) -> web.Response:
    """Return the load of the engine, for load balancers."""
    status = request.app[CONTEXT].engine.status()
    stats = status.stats
    load = {
        "server_load": status.num_requests,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_usage": stats.kv_usage,
    }
    return web.json_response(load)
