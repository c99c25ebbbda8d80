"""Middleware: store each request's arrival time and id; set X-Request-Id and Server."""

import time

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.frontend.connection import SERVER_NAME
from gllm.frontend.context import ARRIVAL, REQUEST_ID
from gllm.frontend.errors import Handler
from gllm.frontend.request_id import request_id
from gllm.observability.logs import LOG_REQUEST_ID


def install(app: web.Application, config: ServerConfig) -> None:
    """Add the middleware to an application."""
    app.middlewares.append(_store_arrival)
    app.on_response_prepare.append(_set_headers)


@web.middleware
async def _store_arrival(request: web.Request, handler: Handler) -> web.StreamResponse:
    request[ARRIVAL] = time.monotonic()
    request[REQUEST_ID] = request_id(request.headers.get("X-Request-Id", ""))
    LOG_REQUEST_ID.set(request[REQUEST_ID])
    return await handler(request)


async def _set_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER_NAME
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
