"""GET /health: does the server work? GET /ready: should it get requests?

Owns the two answers. Knows nothing of what makes an engine healthy.
"""

from aiohttp import web

from gllm.engine.interface import EngineUnavailableError
from gllm.frontend.context import CONTEXT


async def get_health(request: web.Request) -> web.Response:
    """200 while requests are served or drained; 503 while loading, dead or stuck."""
    context = request.app[CONTEXT]
    status = context.engine.status()
    if status.state != "draining":
        context.check_ready()
    if not status.is_healthy:
        raise EngineUnavailableError("stuck", "work is pending, but no step finishes")
    return web.json_response({"status": "ok"})


async def get_readiness(request: web.Request) -> web.Response:
    """200 while new requests are taken."""
    request.app[CONTEXT].check_ready()
    return web.json_response({"status": "ready"})
