"""OpenTelemetry: a span for each request that generates.

Owns what a span says and how spans reach a collector: by a queue that may be full, from a thread of
its own. Knows nothing of prompts and outputs: no span has any. Imported only where traces are asked
for, since its packages are optional.

Attributes are those of OpenTelemetry's semantic conventions for generative AI and HTTP servers;
latencies, for which they have no names, are called as in vLLM's spans (gen_ai.latency.*).
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from urllib.parse import urlsplit

from aiohttp import web
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import (
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gllm import __version__
from gllm.frontend.context import REQUEST_ID
from gllm.frontend.request_summary import SUMMARY, RequestSummary

log = logging.getLogger(__name__)

QUEUED = 4096
"""Spans that wait for the collector, at most; more are dropped, and counted."""
BATCH = 512
LINGER_SECONDS = 1.0
"""For how long a span waits for others to travel with."""
CLOSE_SECONDS = 5.0
"""What the last spans get to reach the collector."""

Value = str | bool | int | float | list[str]


class Tracer:
    """Spans of one server. `dropped` hears of those that go nowhere: why, and how many.

    Raises ValueError for an endpoint that is no URL.
    """

    def __init__(self, endpoint: str, model: str, dropped: Callable[[str, int], None]) -> None:
        _check(endpoint)
        self._model = model
        named = OTELResourceDetector().detect().attributes.get(SERVICE_NAME, "gllm")
        resource = Resource.create({SERVICE_NAME: named, SERVICE_VERSION: __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(SpanQueue(OTLPSpanExporter(endpoint), dropped))
        self._tracer = self._provider.get_tracer("gllm", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def request(
        self, request: web.Request, operation: str, path: str, status: int, seconds: float
    ) -> None:
        """A request has ended, after so many seconds."""
        end = time.time_ns()
        outcome = request.get(SUMMARY)
        name = operation if outcome is None else f"{operation} {self._model}"
        span = self._tracer.start_span(
            name,
            self._propagator.extract(request.headers),
            SpanKind.SERVER,
            start_time=end - round(seconds * 1e9),
        )
        if span.is_recording():
            reasons = [] if outcome is None else outcome.finish_reasons
            attributes: dict[str, Value | None] = {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "gllm",
                "gen_ai.latency.e2e": seconds,
                "http.request.method": request.method,
                "http.route": path,
                "http.response.status_code": status,
                "gllm.request_id": request[REQUEST_ID],
            }
            if outcome is not None:
                attributes |= self._outcome(outcome, reasons)
            if status >= 400 or "error" in reasons:
                attributes["error.type"] = str(status) if status >= 400 else "generation_failed"
            if status >= 500 or "error" in reasons:
                span.set_status(StatusCode.ERROR)
            known = {key: value for key, value in attributes.items() if value is not None}
            span.set_attributes(known)
        span.end(end)

    async def close(self) -> None:
        """Send what waits, for a few seconds at most."""
        await asyncio.to_thread(self._provider.shutdown)

    def _outcome(self, outcome: RequestSummary, reasons: list[str]) -> dict[str, Value | None]:
        """What was asked for, and what came of it."""
        params, tally = outcome.params, outcome.tally
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
            "gen_ai.request.stream": outcome.streams,
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": reasons,
            "gen_ai.response.time_to_first_chunk": outcome.ttft if outcome.streams else None,
            "gen_ai.usage.input_tokens": tally.prompt_tokens,
            "gen_ai.usage.output_tokens": tally.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": tally.cached_tokens,
            "gen_ai.latency.time_to_first_token": outcome.ttft,
            "gen_ai.latency.time_in_queue": outcome.queue_seconds,
        }


class SpanQueue(SpanProcessor):
    """Spans on their way to an exporter. `on_end` never waits for it: where the queue is full the
    span is dropped and counted. (The SDK's own batch processor does not count, and wakes every few
    seconds though there is nothing to send.)"""

    def __init__(self, exporter: SpanExporter, dropped: Callable[[str, int], None]) -> None:
        self._exporter = exporter
        self._dropped = dropped
        self._spans: deque[ReadableSpan] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span that is to be sent."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._changed:
            fits = len(self._spans) < QUEUED and not self._closing
            if fits:
                self._spans.append(span)
                if len(self._spans) in (1, BATCH):
                    self._changed.notify()
        if not fits:
            self._dropped("queue_full", 1)

    def shutdown(self) -> None:
        """Send what is queued, and end; what takes too long is dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS)
        self._exporter.shutdown()

    def _run(self) -> None:
        while spans := self._take():
            try:
                sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
            except Exception:
                log.exception("spans could not be sent")
                sent = False
            if not sent:
                self._dropped("export_failed", len(spans))

    def _take(self) -> list[ReadableSpan]:
        """The next spans, a moment after the first of them; none once all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._spans or self._closing)
            self._changed.wait_for(
                lambda: len(self._spans) >= BATCH or self._closing, LINGER_SECONDS
            )
            return [self._spans.popleft() for _ in range(min(BATCH, len(self._spans)))]


def _check(endpoint: str) -> None:
    """Raises ValueError for what is no URL, or one with a password in it."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"otlp_traces_endpoint is {endpoint!r}, but has to be the whole URL, "
            "as http://localhost:4318/v1/traces"
        )
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "otlp_traces_endpoint has a user in its URL, where logs and processes would tell it: "
            "put credentials into $OTEL_EXPORTER_OTLP_TRACES_HEADERS"
        )
