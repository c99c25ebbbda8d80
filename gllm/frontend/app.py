"""Build the HTTP application: its endpoints and the middleware around them.

A new endpoint is a line in `routes/registry.py`, a new middleware one in `MIDDLEWARE`.
"""

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.engine.interface import EngineInterface
from gllm.frontend.context import CONTEXT, SERVER_CONFIG, ServerContext
from gllm.frontend.endpoint import register_endpoints
from gllm.frontend.handoffs import registry
from gllm.frontend.metrics import Metrics
from gllm.frontend.middleware import keys, observe, origin, rate_limit
from gllm.frontend.routes.registry import ENDPOINTS

MIDDLEWARE = (observe, origin, keys, rate_limit)
"""Modules whose `install` adds a middleware, outermost first."""


def make_app(engine: EngineInterface, config: ServerConfig) -> web.Application:
    """Return the aiohttp application that serves the HTTP API of an engine.

    The engine may still be loading; until it is ready, requests are answered with 503.

    Raises:
        ValueError: A flag has a value that cannot be used; the message names the flag.
    """
    app = web.Application(client_max_size=config.max_body_bytes)
    app[SERVER_CONFIG] = config
    app[CONTEXT] = context = ServerContext(engine, config, Metrics(engine))
    for middleware in MIDDLEWARE:
        middleware.install(app, config)
    registry.install(app, context)
    register_endpoints(app, ENDPOINTS)
    return app
