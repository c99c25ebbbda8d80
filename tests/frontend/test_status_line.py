"""The status line and the access log, with a clock that the test turns."""

import json
import logging
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from gllm.frontend.metrics import Metrics
from gllm.frontend.status_line import StatusLine
from gllm.observability.logs import LOG_REQUEST_ID, JsonFormatter
from gllm.scheduler.plan import SchedulerStats
from tests.frontend.conftest import Server
from tests.support.http.fake_engine import FakeEngine


@dataclass
class Loop:
    """Timers of a clock that stands still until it is turned."""

    now: float = 100.0
    timers: list[tuple[float, Any]] = field(default_factory=list)

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, function: Any, *arguments: Any, context: Context) -> "Loop":
        self.timers.append((self.now + delay, partial(context.run, function, *arguments)))
        return self

    def cancel(self) -> None:
        self.timers.clear()

    def turn(self, seconds: float) -> None:
        """Let time pass, and what is due happen."""
        end = self.now + seconds
        while due := [timer for timer in self.timers if timer[0] <= end]:
            first = min(due, key=lambda timer: timer[0])
            self.timers.remove(first)
            self.now = first[0]
            first[1]()
        self.now = end


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "gllm")
    return caplog


def test_a_line_every_ten_seconds_of_activity(engine: FakeEngine, told: Any) -> None:
    loop: Any = Loop()
    metrics = Metrics(engine)
    line = StatusLine(engine, metrics)
    engine.num_requests = 1
    line.on_request(loop)
    loop.turn(3)
    line.on_request(loop)
    metrics.output.num_tokens = 425
    engine.stats = SchedulerStats(
        3, 1, 0.25, 2, prefill_tokens=1200, prefix_queries=800, prefix_hits=200
    )
    loop.turn(6.9)
    assert told.messages == []
    loop.turn(0.2)
    assert told.messages == [
        "requests: 3 running, 1 waiting; tokens/s: 120.0 prompt, 42.5 generated; "
        "KV cache: 25.0 % used, prefix cache hit rate: 25.0 %"
    ]
    metrics.output.num_tokens += 10
    loop.turn(10)
    assert "tokens/s: 0.0 prompt, 1.0 generated" in told.messages[1]
    assert "hit rate: 0.0 %" in told.messages[1]
    told_as_json = json.loads(JsonFormatter("frontend").format(told.records[0]))
    assert told_as_json["output_tokens_per_second"] == 42.5
    assert told_as_json["requests_running"] == 3


def test_the_line_is_about_no_one_request(engine: FakeEngine, told: Any) -> None:
    loop: Any = Loop()
    line = StatusLine(engine, Metrics(engine))
    seen: list[str] = []

    def look(record: logging.LogRecord) -> bool:
        seen.append(LOG_REQUEST_ID.get())
        return True

    told.handler.addFilter(look)
    token = LOG_REQUEST_ID.set("abc")
    line.on_request(loop)
    loop.turn(10)
    LOG_REQUEST_ID.reset(token)
    told.handler.removeFilter(look)
    assert seen == [""]


def test_silence_and_no_timer_when_idle(engine: FakeEngine, told: Any) -> None:
    loop: Any = Loop()
    line = StatusLine(engine, Metrics(engine))
    assert loop.timers == []
    line.on_request(loop)
    loop.turn(1000)
    assert len(told.messages) == 1, "the ten seconds in which there was a request"
    assert loop.timers == []
    line.on_request(loop)
    assert len(loop.timers) == 1
    loop.turn(1000)
    assert len(told.messages) == 2


def test_nothing_is_told_after_the_end(engine: FakeEngine, told: Any) -> None:
    loop: Any = Loop()
    line = StatusLine(engine, Metrics(engine))
    line.on_request(loop)
    line.close()
    loop.turn(100)
    assert told.messages == []


async def test_the_access_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "gllm.frontend.middleware.observe")
    secret = "quite a secret"
    await server.complete(prompt=secret, max_tokens=4)
    await server.complete(prompt=secret, temperature=9)
    await server.client.get("/v1/models/no/such?key=hidden")
    await server.client.get("/nothing")
    await server.client.get("/metrics")
    lines = [record.fields for record in caplog.records if hasattr(record, "fields")]
    prompt = len(server.engine.calls[0].prompt)
    assert [(line["path"], line["status"], line["output_tokens"]) for line in lines] == [
        ("/v1/completions", 200, 4),
        ("/v1/completions", 400, 0),
        ("/v1/models/{model}", 404, 0),
        ("(no endpoint)", 404, 0),
    ]
    assert lines[0]["prompt_tokens"] == prompt
    assert caplog.messages[0].startswith(f"POST /v1/completions: 200, {prompt} + 4 tokens, ")
    for hidden in (secret, "hidden", "such"):
        assert hidden not in caplog.text


async def test_the_access_log_is_silent_at_info(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await server.complete()
    assert [record for record in caplog.records if record.name.startswith("gllm")] == []
