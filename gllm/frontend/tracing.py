"""OpenTelemetry traces: one span per request that generates.

Spans contain no prompts and no outputs. This module is imported only if traces are enabled, because
its packages are optional. Attributes follow OpenTelemetry's semantic conventions for generative AI
and HTTP servers; latencies, which the conventions do not name, are named as in vLLM's spans
(gen_ai.latency.*).
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol
from urllib.parse import urlsplit

from aiohttp import web
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import (
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gllm.frontend.context import REQUEST_ID
from gllm.frontend.request_metrics import SUMMARY, RequestSummary
from gllm.options.addresses import is_loopback
from gllm.options.version import __version__

log = logging.getLogger(__name__)

MAX_QUEUED_SPANS = 4096
"""Spans that wait for the collector; further ones are dropped and counted."""
SHUTDOWN_SECONDS = 5.0
"""Time for the queued spans to reach the collector when the server stops."""

SDK_LOGGER = "opentelemetry.exporter"
"""Logger of the SDK's exporters, which write several lines for each batch that fails."""
AttributeValue = str | bool | int | float | list[str]


class OnDrop(Protocol):
    """Callback that counts OpenTelemetry spans that were dropped; called from any thread."""

    def __call__(self, reason: str, /, *, amount: int) -> None:
        """Count spans dropped for a reason, `queue_full` or `export_failed`."""


class RequestTracer:
    """Records an OpenTelemetry span per request and exports the spans by OTLP over HTTP.

    Args:
        endpoint: URL of the collector's traces endpoint.
        model: Name of the served model.
        on_drop: Counts the spans that do not reach the collector.

    Raises:
        ValueError: The endpoint is not a URL, or contains a password.
    """

    def __init__(self, endpoint: str, model: str, on_drop: OnDrop) -> None:
        _check_endpoint(endpoint)
        _exempt_loopback_from_proxies(urlsplit(endpoint).hostname or "")
        self._model = model
        service_name = OTELResourceDetector().detect().attributes.get(SERVICE_NAME, "gllm")
        resource = Resource.create({SERVICE_NAME: service_name, SERVICE_VERSION: __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint)
        self._provider.add_span_processor(
            CountingSpanProcessor(exporter, on_drop, MAX_QUEUED_SPANS)
        )
        self._tracer = self._provider.get_tracer("gllm", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record_request(
        self, request: web.Request, operation: str, path: str, status: int, seconds: float
    ) -> None:
        """Record the span of a request that ends now and took `seconds`."""
        end_ns = time.time_ns()
        summary = request.get(SUMMARY)
        span = self._tracer.start_span(
            operation if summary is None else f"{operation} {self._model}",
            self._propagator.extract(request.headers),
            SpanKind.SERVER,
            start_time=end_ns - round(seconds * 1e9),
        )
        if span.is_recording():
            finish_reasons = [] if summary is None else summary.finish_reasons
            attributes: dict[str, AttributeValue | None] = {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "gllm",
                "gen_ai.latency.e2e": seconds,
                "http.request.method": request.method,
                "http.route": path,
                "http.response.status_code": status,
                "gllm.request_id": request[REQUEST_ID],
            }
            if summary is not None:
                attributes |= self._generation_attributes(summary, finish_reasons)
            if status >= 400 or "error" in finish_reasons:
                attributes["error.type"] = str(status) if status >= 400 else "generation_failed"
            if status >= 500 or "error" in finish_reasons:
                span.set_status(StatusCode.ERROR)
            span.set_attributes({k: value for k, value in attributes.items() if value is not None})
        span.end(end_ns)

    async def close(self) -> None:
        """Export the queued spans, for at most SHUTDOWN_SECONDS."""
        # The SDK may wait longer for a collector that does not answer; a daemon thread may be left.
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, SHUTDOWN_SECONDS)

    def _generation_attributes(
        self, summary: RequestSummary, finish_reasons: list[str]
    ) -> dict[str, AttributeValue | None]:
        """Return the attributes of sampling parameters, token counts and latencies."""
        params, usage, ttft = summary.params, summary.usage, summary.ttft_seconds
        return {
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "gen_ai.request.presence_penalty": params.presence_penalty,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.stream": summary.is_streaming,
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": finish_reasons,
            "gen_ai.response.time_to_first_chunk": ttft if summary.is_streaming else None,
            "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
            "gen_ai.usage.output_tokens": usage.num_completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.num_cached_tokens,
            "gen_ai.latency.time_to_first_token": ttft,
            "gen_ai.latency.time_in_queue": summary.queue_seconds,
            "gllm.resumptions": summary.num_resumptions or None,
        }


class CountingSpanProcessor(BatchSpanProcessor):
    """OpenTelemetry BatchSpanProcessor that counts the spans it drops because its queue is full.

    The SDK counts them only for its own metrics. A span that finds the queue full is dropped here,
    before the SDK would drop the oldest one.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        on_drop: OnDrop,
        max_queue_size: int,
        schedule_delay_millis: float | None = None,
        max_export_batch_size: int | None = None,
    ) -> None:
        self._on_drop = on_drop
        self._free_places = threading.BoundedSemaphore(max_queue_size)
        super().__init__(
            _CountingExporter(exporter, self._on_export, on_drop),
            max_queue_size,
            schedule_delay_millis,
            max_export_batch_size,
        )

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a sampled span, or drop and count it if the queue is full."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._free_places.acquire(blocking=False):
            super().on_end(span)
        else:
            self._on_drop("queue_full", amount=1)

    def _on_export(self, num_spans: int) -> None:
        self._free_places.release(num_spans)


class _LastMessage(logging.Handler):
    """Log handler that keeps the text of the last record and writes nothing."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text of a record."""
        self.text = record.getMessage()


_SDK_MESSAGE = _LastMessage(logging.WARNING)
"""The SDK's reason why the last batch failed."""


class _CountingExporter(SpanExporter):
    """Exporter that reports the size of each batch, and the spans of batches that failed.

    A failed batch is one warning, which the log handler writes once per minute.
    """

    def __init__(
        self, exporter: SpanExporter, on_export: Callable[[int], None], on_drop: OnDrop
    ) -> None:
        self._exporter = exporter
        self._on_export = on_export
        self._on_drop = on_drop
        sdk_log = logging.getLogger(SDK_LOGGER)
        sdk_log.addHandler(_SDK_MESSAGE)
        sdk_log.propagate = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export a batch."""
        self._on_export(len(spans))
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self._on_drop("export_failed", amount=len(spans))
                log.warning("traces do not reach the OTLP collector: %s", _SDK_MESSAGE.text)
        return result

    def shutdown(self) -> None:
        """Stop the exporter."""
        self._exporter.shutdown()


def _exempt_loopback_from_proxies(host: str) -> None:
    """Add a loopback host to $NO_PROXY, because the SDK's HTTP client reads the environment."""
    exempt = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if is_loopback(host) and host not in exempt.split(","):
        exempt = f"{exempt},{host}".removeprefix(",")
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = exempt


def _check_endpoint(endpoint: str) -> None:
    """Raise ValueError if the endpoint is not a URL, or contains a password."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"otlp_traces_endpoint is {endpoint!r}, but has to be a whole URL, such as "
            "http://localhost:4318/v1/traces"
        )
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "otlp_traces_endpoint contains a user name or password, which would show in logs and "
            "process lists: set $OTEL_EXPORTER_OTLP_TRACES_HEADERS instead"
        )
