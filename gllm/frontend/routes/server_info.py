"""GET /server_info and GET /load.

Owns what is told, and that no secret is. Knows nothing of metrics.
"""

import dataclasses

import msgspec
from aiohttp import web

from gllm import __version__
from gllm.frontend.context import CONTEXT


async def server_info(request: web.Request) -> web.Response:
    """The configuration of the server and of its engine."""
    context = request.app[CONTEXT]
    told = {
        "version": __version__,
        "model": msgspec.to_builtins(context.engine.model),
        "engine": context.engine.info(),
        "server": dataclasses.asdict(context.config),
    }
    return web.json_response(told)


async def load(request: web.Request) -> web.Response:
    """How busy the engine is, for whoever spreads requests over servers."""
    engine = request.app[CONTEXT].engine
    stats = engine.stats
    told = {
        "server_load": engine.num_requests,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_usage": stats.kv_usage,
    }
    return web.json_response(told)
