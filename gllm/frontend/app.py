"""The HTTP server's routes and what wraps all of them.

Owns the registry of endpoints, request ids and the server's limits. Knows nothing of what an
endpoint does: adding one is a file in routes/ and a line here.
"""

import re
import time
import uuid

from aiohttp import web

from gllm.config import ServerConfig
from gllm.engine_api import EngineLike
from gllm.frontend.context import ARRIVAL, CONTEXT, REQUEST_ID, Context
from gllm.frontend.endpoint import Endpoint
from gllm.frontend.errors import Handler, error_middleware
from gllm.frontend.fields.chat import ChatFields
from gllm.frontend.fields.completions import CompletionFields
from gllm.frontend.fields.control import AbortFields
from gllm.frontend.fields.tokens import DetokenizeFields, TokenizeFields
from gllm.frontend.metrics import Metrics
from gllm.frontend.middleware import observe
from gllm.frontend.routes import (
    chat,
    completions,
    control,
    health,
    metrics,
    models,
    openapi,
    page,
    server_info,
    tokens,
    version,
)
from gllm.frontend.routes.openapi import ALL
from gllm.logs import REQUEST_ID as REQUEST_LOGGED

ENDPOINTS = (
    Endpoint("GET", "/", page.index, content="text/html"),
    Endpoint("HEAD", "/", page.index, content="text/html"),
    Endpoint("GET", "/page/{name}", page.file, content="*/*"),
    Endpoint("HEAD", "/page/{name}", page.file, content="*/*"),
    Endpoint("POST", "/v1/chat/completions", chat.create, ChatFields),
    Endpoint("POST", "/v1/completions", completions.create, CompletionFields),
    Endpoint("GET", "/v1/models", models.listing),
    Endpoint("GET", "/v1/models/{model}", models.one),
    Endpoint("GET", "/health", health.health),
    Endpoint("GET", "/ready", health.ready),
    Endpoint("GET", "/metrics", metrics.metrics, content="text/plain"),
    Endpoint("HEAD", "/metrics", metrics.metrics, content="text/plain"),
    Endpoint("GET", "/version", version.version),
    Endpoint("GET", "/openapi.json", openapi.document),
    Endpoint("POST", "/tokenize", tokens.tokenize, TokenizeFields),
    Endpoint("POST", "/detokenize", tokens.detokenize, DetokenizeFields),
    Endpoint("GET", "/server_info", server_info.server_info),
    Endpoint("GET", "/load", server_info.load),
    Endpoint("POST", "/abort", control.abort, AbortFields),
    Endpoint("POST", "/reset_prefix_cache", control.reset_prefix_cache),
    Endpoint("POST", "/start_profile", control.start_profile),
    Endpoint("POST", "/stop_profile", control.stop_profile),
)

MAX_HEADER_BYTES = 16384
"""Of one header, and of the request line."""


def make_app(engine: EngineLike, config: ServerConfig) -> web.Application:
    """The application around an engine, which may still be loading.

    Raises ValueError that names the flag for what cannot be.
    """
    app = web.Application(client_max_size=config.max_body_bytes)
    app[CONTEXT] = Context(engine, config, Metrics(engine))
    app.middlewares.append(arrival_middleware)
    observe.install(app, config)
    app.middlewares.append(error_middleware)
    app.on_response_prepare.append(_echo_request_id)
    app[ALL] = ENDPOINTS
    for endpoint in ENDPOINTS:
        # Names of models may have slashes.
        path = endpoint.path.replace("{model}", "{model:.+}")
        app.router.add_route(endpoint.method, path, endpoint.handler)
    return app


def make_runner(app: web.Application, config: ServerConfig) -> web.AppRunner:
    """What serves the application; a client that disconnects cancels its handler."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=config.shutdown_timeout,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
    )


@web.middleware
async def arrival_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every request has a time and an id: the client's, without odd characters, or our own."""
    request[ARRIVAL] = time.monotonic()
    given = re.sub(r"[^A-Za-z0-9._:-]", "", request.headers.get("X-Request-Id", ""))
    request[REQUEST_ID] = given[:128] or uuid.uuid4().hex
    REQUEST_LOGGED.set(request[REQUEST_ID])
    return await handler(request)


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Tell the client the id, whatever the answer is."""
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
