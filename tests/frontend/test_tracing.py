"""Spans as a collector gets them."""

import asyncio
import io
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from gllm.frontend import tracing
from gllm.frontend.app import make_app
from gllm.frontend.metrics import Metrics
from gllm.frontend.routes.registry import ENDPOINTS
from gllm.observability.logs import DeduplicatingHandler
from tests.frontend.conftest import CHAT, CHAT_PATH, CONFIG, TEXT_PATH, Server
from tests.support.http.fake_engine import FakeEngine

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Collector:
    """What was sent to it."""

    resources: list[dict[str, Any]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    async def receive(self, request: web.Request) -> web.Response:
        told = ExportTraceServiceRequest.FromString(await request.read())
        for part in told.resource_spans:
            self.resources.append(values(part.resource.attributes))
            self.spans += [span for scope in part.scope_spans for span in scope.spans]
        return web.Response()


def values(attributes: Any) -> dict[str, Any]:
    """Attributes as Python's values."""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        given = getattr(value, kind)
        return [plain(one) for one in given.values] if kind == "array_value" else given

    return {entry.key: plain(entry.value) for entry in attributes}


@asynccontextmanager
async def traced(engine: FakeEngine) -> AsyncIterator[tuple[Server, Collector]]:
    """A server that sends its spans; the collector has them when the server has ended."""
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.receive)
    async with TestServer(app) as receiver:
        config = replace(CONFIG, otlp_traces_endpoint=str(receiver.make_url("/v1/traces")))
        async with TestClient(TestServer(make_app(engine, config))) as client:
            yield Server(engine, client), collector


async def test_a_span_says_what_was_asked_and_what_came(engine: FakeEngine) -> None:
    async with traced(engine) as (server, collector):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
        body = {**CHAT, "max_tokens": 5, "temperature": 0.5, "seed": 7, "n": 2}
        assert (await server.post(CHAT_PATH, body, headers=headers)).status == 200
        prompt = len(server.engine.calls[0].prompt)
    (resource,) = collector.resources
    assert resource["service.name"] == "gllm"
    (span,) = collector.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert (span.name, span.kind) == ("chat fake/model", Span.SPAN_KIND_SERVER)
    assert span.status.code == Status.STATUS_CODE_UNSET
    found = values(span.attributes)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "gllm",
        "gen_ai.request.model": "fake/model",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": False,
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "http.route": CHAT_PATH,
        "http.response.status_code": 200,
        "gllm.request_id": "mine",
    }
    assert {key: found.get(key) for key in expected} == expected
    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert found["gen_ai.latency.e2e"] == pytest.approx(seconds, abs=1e-6)
    assert found["gen_ai.latency.time_in_queue"] == 0
    assert "Hi" not in str(span), "nothing of the prompt"


async def test_streams_refusals_and_failures(engine: FakeEngine) -> None:
    async with traced(engine) as (server, collector):
        await server.stream(TEXT_PATH, max_tokens=4)
        assert (await server.complete(temperature=9)).status == 400
        engine.fail_after = 2
        assert (await server.complete()).status == 500
    streamed, refused, failed = collector.spans
    found = values(streamed.attributes)
    assert not streamed.parent_span_id
    assert streamed.name == "text_completion fake/model"
    assert found["gen_ai.request.stream"] is True
    first = found["gen_ai.latency.time_to_first_token"]
    assert found["gen_ai.response.time_to_first_chunk"] == first
    assert (refused.name, refused.status.code) == ("text_completion", Status.STATUS_CODE_UNSET)
    assert values(refused.attributes)["error.type"] == "400"
    assert failed.status.code == Status.STATUS_CODE_ERROR
    assert values(failed.attributes)["gen_ai.response.finish_reasons"] == ["error"]


async def test_a_client_that_leaves(engine: FakeEngine) -> None:
    engine.delay = 30
    async with traced(engine) as (server, collector):
        asked = asyncio.create_task(server.chat())
        while not engine.num_requests:
            await asyncio.sleep(0.005)
        asked.cancel()
        await asyncio.wait({asked})
        await server.idle()
    (span,) = collector.spans
    found = values(span.attributes)
    assert (found["http.response.status_code"], found["error.type"]) == (499, "499")
    assert found["gen_ai.response.finish_reasons"] == ["abort"]
    assert "gen_ai.latency.time_to_first_token" not in found


async def test_headers_that_name_no_trace_begin_a_new_one(engine: FakeEngine) -> None:
    async with traced(engine) as (server, collector):
        for header in ("nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"):
            answer = await server.post(CHAT_PATH, CHAT, headers={"traceparent": header})
            assert answer.status == 200
    assert len({span.trace_id for span in collector.spans}) == 3
    assert not any(span.parent_span_id for span in collector.spans)


async def test_what_the_client_does_not_sample_is_not_sent(engine: FakeEngine) -> None:
    async with traced(engine) as (server, collector):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        assert (await server.post(CHAT_PATH, CHAT, headers=headers)).status == 200
        assert (await server.client.get("/health")).status == 200
    assert collector.spans == []


async def test_a_collector_that_is_not_there_holds_nobody_up(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    config = replace(CONFIG, otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")
    async with TestClient(TestServer(make_app(engine, config))) as client:
        assert (await Server(engine, client).chat()).status == 200


async def test_a_dead_collector_is_one_warning_per_minute(engine: FakeEngine) -> None:
    """Each batch of the SDK fails with several lines of its own, which differ."""

    class Dead(SpanExporter):
        num_batches = 0

        def export(self, spans: Any) -> SpanExportResult:
            self.num_batches += 1
            log = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
            log.warning("Transient error, retrying in %.2fs.", self.num_batches)
            log.error(f"Failed to export batch {self.num_batches}: connection refused")
            return SpanExportResult.FAILURE

    now, lines = 0.0, io.StringIO()
    handler = DeduplicatingHandler(lines, lambda: now)
    logging.getLogger().addHandler(handler)
    metrics = Metrics(engine)
    processor = tracing.CountingSpanProcessor(Dead(), metrics.dropped_spans.count, 9, 5000, 3)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    try:
        for number in range(30):
            now = 4.0 * number
            provider.get_tracer("test").start_span("one").end()
            processor.force_flush()
    finally:
        logging.getLogger().removeHandler(handler)
        provider.shutdown()
    first, second = lines.getvalue().splitlines()
    assert first.endswith("OTLP collector: Failed to export batch 1: connection refused")
    assert "Failed to export batch 16: connection refused (14 more in 60 s)" in second


async def test_a_collector_on_loopback_is_not_reached_by_a_proxy(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with traced(engine) as (server, collector):
        assert (await server.chat()).status == 200
    assert len(collector.spans) == 1
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "example.org,127.0.0.1"


class Stuck(SpanExporter):
    """Exports nothing until it is let."""

    def __init__(self) -> None:
        self.busy, self.go_on = threading.Event(), threading.Event()
        self.sent = 0

    def export(self, spans: Any) -> SpanExportResult:
        self.busy.set()
        self.go_on.wait()
        self.sent += len(spans)
        return SpanExportResult.FAILURE


def test_a_full_queue_drops_and_counts(engine: FakeEngine) -> None:
    metrics, exporter = Metrics(engine), Stuck()
    processor = tracing.CountingSpanProcessor(exporter, metrics.dropped_spans.count, 3, 1, 3)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("test")
    tracer.start_span("first").end()
    assert exporter.busy.wait(60)
    for _ in range(5):
        tracer.start_span("next").end()
    full = b'gllm:trace_spans_dropped_total{model_name="fake/model",reason="queue_full"} 2.0'
    assert full in metrics.render()
    exporter.go_on.set()
    provider.shutdown()
    assert exporter.sent == 4
    failed = b'gllm:trace_spans_dropped_total{model_name="fake/model",reason="export_failed"} 4.0'
    assert failed in metrics.render()


@pytest.mark.parametrize("url", ["localhost:4318", "file:///etc/hosts", "http://me:pw@host/v1"])
def test_an_endpoint_that_cannot_be_is_refused(engine: FakeEngine, url: str) -> None:
    with pytest.raises(ValueError, match="otlp_traces_endpoint") as refused:
        make_app(engine, replace(CONFIG, otlp_traces_endpoint=url))
    assert "pw" not in str(refused.value)


def test_missing_packages_are_named(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gllm.frontend.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match="pip install opentelemetry-sdk"):
        make_app(engine, replace(CONFIG, otlp_traces_endpoint="http://localhost:4318/v1/traces"))


def test_every_endpoint_that_generates_is_traced() -> None:
    assert all((one.operation is not None) == one.can_stream for one in ENDPOINTS)
