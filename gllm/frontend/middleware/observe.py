"""Middleware: status line, access log (level debug) and traces of requests.

Neither log nor traces contain prompts or outputs.
"""

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.frontend.context import ARRIVAL, CONTEXT
from gllm.frontend.endpoint import find_endpoint
from gllm.frontend.errors import Handler
from gllm.frontend.request_summary import SUMMARY
from gllm.frontend.status_line import StatusLine

if TYPE_CHECKING:
    from gllm.frontend.tracing import RequestTracer

log = logging.getLogger(__name__)

CLIENT_DISCONNECTED_STATUS = 499
"""Status in logs and traces if the client disconnected before the answer."""

STATUS_LINE = web.AppKey("status_line", StatusLine)
TRACER: web.AppKey["RequestTracer"] = web.AppKey("tracer")


def install(app: web.Application, config: ServerConfig) -> None:
    """Add the middleware to an application. Raise ValueError if traces cannot be enabled."""
    context = app[CONTEXT]
    app[STATUS_LINE] = StatusLine(context.engine, context.metrics)
    app.middlewares.append(_observe)
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
        config.otlp_traces_endpoint, model, context.metrics.count_dropped_spans
    )


async def _end(app: web.Application) -> None:
    app[STATUS_LINE].close()
    if TRACER in app:
        await app[TRACER].close()


@web.middleware
async def _observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    endpoint = find_endpoint(request)
    path = "" if endpoint is None else endpoint.path
    operation = None if endpoint is None else endpoint.operation
    if operation is not None:
        request.app[STATUS_LINE].on_request(asyncio.get_running_loop())
    status = CLIENT_DISCONNECTED_STATUS
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        seconds = time.monotonic() - request[ARRIVAL]
        is_logged = endpoint is None or not endpoint.is_polled
        if is_logged and log.isEnabledFor(logging.DEBUG):
            _log(request, path, status, seconds)
        if operation is not None and TRACER in request.app:
            request.app[TRACER].record_request(request, operation, path, status, seconds)


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
