"""Close connections while the server drains, so that clients reconnect to another server."""

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.frontend.context import CONTEXT


def install(app: web.Application, config: ServerConfig) -> None:
    """Add the middleware to an application."""
    app.on_response_prepare.append(_close)


async def _close(request: web.Request, response: web.StreamResponse) -> None:
    if request.app[CONTEXT].engine.state == "draining":
        response.force_close()
        # aiohttp has already set its own headers.
        response.headers["Connection"] = "close"
