"""GET /server_info and GET /load.

Owns what is told, and that no secret is. Knows nothing of metrics.
"""

import dataclasses
from typing import Any

import msgspec
from aiohttp import web

from gllm import __version__
from gllm.config.server import ServerConfig
from gllm.frontend.context import CONTEXT


async def get_server_info(request: web.Request) -> web.Response:
    """The configuration of the server and of its engine."""
    context = request.app[CONTEXT]
    told = {
        "version": __version__,
        "model": msgspec.to_builtins(context.engine.model),
        "engine": context.engine.describe(),
        "server": _told(context.config),
    }
    return web.json_response(told)


def _told(config: ServerConfig) -> dict[str, Any]:
    """A configuration without its secrets."""
    open_ones = (one for one in dataclasses.fields(config) if not one.metadata.get("secret"))
    return {one.name: getattr(config, one.name) for one in open_ones}


async def get_load(request: web.Request) -> web.Response:
    """How busy the engine is, for whoever spreads requests over servers."""
    status = request.app[CONTEXT].engine.status()
    stats = status.stats
    told = {
        "server_load": status.num_requests,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_usage": stats.kv_usage,
    }
    return web.json_response(told)
