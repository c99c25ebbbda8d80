"""While the server drains, every answer ends its connection.

Owns nothing but that header: clients and proxies that keep connections find another server for what
they ask next. Knows nothing of who is refused (context.py).
"""

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.frontend.context import CONTEXT


def install(app: web.Application, config: ServerConfig) -> None:
    """Put it into an application."""
    app.on_response_prepare.append(_close)


async def _close(request: web.Request, response: web.StreamResponse) -> None:
    if request.app[CONTEXT].engine.status().state == "draining":
        response.force_close()
        # aiohttp has written its own headers by now.
        response.headers["Connection"] = "close"
