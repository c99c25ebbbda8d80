"""GET /health and GET /ready, for probes."""

from aiohttp import web

from gllm.engine.interface import EngineUnavailableError
from gllm.frontend.context import CONTEXT
from gllm.frontend.json_encoding import json_response
from gllm.frontend.server_response_schemas import HealthResponse, StatusResponse


async def get_health(request: web.Request) -> web.Response:
    """Return 200 while the server works, recovers or sleeps; 503 while loading, dead or stuck."""
    context = request.app[CONTEXT]
    status = context.engine.status()
    if status.state not in ("draining", "recovering", "sleeping"):
        context.check_ready()
    # A recovery takes its time without a step, and ends by itself.
    if not status.is_healthy and status.state != "recovering":
        raise EngineUnavailableError("stuck", "requests are pending, but no step completes")
    return json_response(HealthResponse(status="ok", state=status.state))


async def get_readiness(request: web.Request) -> web.Response:
    """Return 200 while the server runs requests, else 503."""
    request.app[CONTEXT].check_ready()
    return json_response(StatusResponse(status="ready"))
