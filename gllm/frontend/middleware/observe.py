"""Outermost middleware: id, headers, errors, access log (level debug), status line and traces.

Neither log nor traces contain prompts or outputs.
"""

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.frontend.connection import SERVER_NAME
from gllm.frontend.context import ARRIVAL, CONTEXT, REQUEST_ID, WARNINGS
from gllm.frontend.endpoint import find_endpoint
from gllm.frontend.errors import Handler, error_response, to_client_error
from gllm.frontend.request_id import request_id
from gllm.frontend.request_metrics import SUMMARY
from gllm.frontend.status_line import StatusLine
from gllm.observability.logs import LOG_REQUEST_ID

if TYPE_CHECKING:
    from gllm.frontend.tracing import RequestTracer

log = logging.getLogger(__name__)

CLIENT_DISCONNECTED_STATUS = 499
"""Status in logs and traces if the client disconnected before the answer."""

MAX_WARNINGS = 20
"""Maximum number of warnings in a header."""
MAX_WARNING_CHARACTERS = 1000
"""Maximum characters of a Warning header, which may quote the request."""

STATUS_LINE = web.AppKey("status_line", StatusLine)
TRACER: web.AppKey["RequestTracer"] = web.AppKey("tracer")


def install(app: web.Application, config: ServerConfig) -> None:
    """Add middleware that counts, logs and traces requests, and the periodic log line of the load.

    An application without an engine, such as that of a cluster's master, has neither the log line
    nor traces.

    Raises:
        ValueError: Traces cannot be enabled.
    """
    app.middlewares.append(_observe)
    app.on_response_prepare.append(_set_headers)
    context = app.get(CONTEXT)
    if context is None:
        return
    app[STATUS_LINE] = StatusLine(context.engine, context.metrics)
    app.on_cleanup.append(_end)
    if not config.otlp_traces_endpoint:
        return
    try:
        from gllm.frontend.tracing import RequestTracer
    except ImportError as error:
        raise ValueError(
            f"otlp_traces_endpoint needs packages that are not there ({error}): "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from error
    model = context.engine.model.name
    app[TRACER] = RequestTracer(
        config.otlp_traces_endpoint, model, context.metrics.dropped_spans.count
    )


async def _end(app: web.Application) -> None:
    app[STATUS_LINE].close()
    if TRACER in app:
        await app[TRACER].close()


@web.middleware
async def _observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Store a request's arrival and id, answer its errors, and record it."""
    request[ARRIVAL] = arrival = time.monotonic()
    request[REQUEST_ID] = current_id = request_id(request.headers.get("X-Request-Id", ""))
    LOG_REQUEST_ID.set(current_id)
    endpoint = find_endpoint(request)
    path = "" if endpoint is None else endpoint.path
    operation = None if endpoint is None else endpoint.operation
    if operation is not None:
        request.app[STATUS_LINE].on_request(asyncio.get_running_loop())
    status = CLIENT_DISCONNECTED_STATUS
    try:
        try:
            response = await handler(request)
        except ConnectionError:
            raise  # the client has disconnected
        except Exception as error:
            context = request.app.get(CONTEXT)
            architecture = "" if context is None else context.engine.model.architecture
            response = error_response(to_client_error(error, request.path, architecture))
        status = response.status
        return response
    finally:
        seconds = time.monotonic() - arrival
        is_logged = endpoint is None or not endpoint.is_polled
        if is_logged and log.isEnabledFor(logging.DEBUG):
            _log(request, path, status, seconds)
        if operation is not None and TRACER in request.app:
            request.app[TRACER].record_request(request, operation, path, status, seconds)


async def _set_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER_NAME
    if warnings := request.get(WARNINGS):
        response.headers["Warning"] = warning_header(warnings)
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
    context = request.app.get(CONTEXT)
    if context is not None and context.engine.state == "draining":
        # So that the client connects to another server.
        response.force_close()
        # aiohttp has already set its own headers.
        response.headers["Connection"] = "close"


def warning_header(warnings: Sequence[str]) -> str:
    """Return a `Warning` header with the warnings about a request. Source: RFC 7234, section 5.5.

    Characters that a quoted header cannot have are replaced.
    """
    text = re.sub(r"[^ !#-\[\]-~]", "?", "; ".join(warnings[:MAX_WARNINGS]))
    return f'299 gllm "{text[:MAX_WARNING_CHARACTERS]}"'


def _log(request: web.Request, path: str, status: int, seconds: float) -> None:
    """Log one line, with the endpoint's path: the requested path may contain anything."""
    summary = request.get(SUMMARY)
    usage = summary.usage if summary else None
    fields = {
        "method": request.method,
        "path": path or "(no endpoint)",
        "status": status,
        "prompt_tokens": usage.num_prompt_tokens if usage else 0,
        "output_tokens": usage.num_completion_tokens if usage else 0,
        "seconds": round(seconds, 6),
    }
    text = "%s %s: %d, %d + %d tokens, %.3f s"
    if summary and summary.num_resumptions:
        fields["resumptions"] = summary.num_resumptions
        text += ", resumed %d times"
    log.debug(text, *fields.values(), extra={"fields": fields})
