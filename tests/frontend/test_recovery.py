"""The server while its engine recovers, and what becomes of the requests."""

import asyncio
import logging
import time

import openai
import pytest

from gllm.engine.interface import PoisonRequestError, embedding_error
from tests.frontend.conftest import CHAT, CHAT_PATH, TEXT_PATH, serving
from tests.frontend.test_plain_routes import get, metrics
from tests.frontend.test_stream import until
from tests.frontend.test_tracing import traced, values

CAUSE = "stage 1 was killed by SIGKILL"
PATHS = [CHAT_PATH, TEXT_PATH, "/v1/responses", "/v1/messages"]
BODIES = {
    CHAT_PATH: CHAT,
    TEXT_PATH: {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {**CHAT, "max_tokens": 20},
}


def recover(engine):
    """Begin a recovery."""
    engine.state, engine.recovery_cause = "recovering", CAUSE
    engine.recovering_since = time.monotonic()


async def test_probes_say_that_it_recovers(server):
    assert await get(server, "/health") == (200, {"status": "ok", "state": "ready"})
    recover(server.engine)
    assert await get(server, "/health") == (200, {"status": "ok", "state": "recovering"})
    status, body = await get(server, "/ready")
    assert (status, body["error"]["code"]) == (503, "engine_recovering")
    assert body["error"]["message"] == f"the engine is recovering: {CAUSE}"
    server.engine.state = "ready"
    assert (await get(server, "/ready"))[0] == 200


@pytest.mark.parametrize("path", PATHS)
async def test_requests_wait_for_the_end_of_a_recovery(server, path):
    recover(server.engine)
    request = asyncio.create_task(server.post(path, BODIES[path]))
    await until(lambda: server.engine.num_requests == 1)
    await asyncio.sleep(0.05)
    assert not request.done()
    server.engine.state = "ready"
    assert (await request).status == 200


async def test_a_waiting_stream_gets_comments_before_its_first_token(engine):
    recover(engine)
    async with (
        serving(engine, write_timeout=0.05) as server,
        server.client.post(CHAT_PATH, json={**CHAT, "stream": True}) as response,
    ):
        assert response.status == 200
        assert await response.content.readline() == b": keep-alive\n"
        engine.state = "ready"
        body = await response.read()
    events = [line for line in body.splitlines() if line.startswith(b"data: {")]
    assert all(b"error" not in event for event in events)
    assert b'"finish_reason":"stop"' in events[-1]


async def test_waiting_requests_count_for_the_limit(server):
    recover(server.engine)
    server.engine.num_requests = 64
    refused = await server.chat()
    assert (refused.status, refused.error["code"]) == (503, "engine_full")


async def test_a_recovery_that_takes_too_long_refuses_requests(server):
    recover(server.engine)
    server.engine.is_recovery_overdue = True
    for path in PATHS:
        refused = await server.post(path, BODIES[path])
        assert (refused.status, refused.headers["Retry-After"]) == (503, "5")
        assert refused.error["code"] == "engine_recovering"
        assert CAUSE in refused.error["message"]
    assert server.engine.calls == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("kind", "status", "code", "name", "value"),
    [
        ("unavailable", 503, "engine_recovering", "Retry-After", "5"),
        ("poison", 500, "request_poisoned", "x-should-retry", "false"),
        ("", 500, "generation_failed", "x-should-retry", None),
    ],
)
async def test_an_error_tells_clients_whether_to_try_again(
    server, path, kind, status, code, name, value
):
    server.engine.fail_after, server.engine.fail_kind = 0, kind
    failed = await server.post(path, BODIES[path])
    assert (failed.status, failed.error["code"]) == (status, code)
    assert failed.headers.get(name) == value
    async with server.client.post(path, json={**BODIES[path], "stream": True}) as response:
        body = await response.text()
    assert code in body


async def test_a_request_that_ended_workers_is_refused(server):
    server.engine.raises = PoisonRequestError("the same request ended worker processes before")
    failed = await server.chat()
    assert (failed.status, failed.error["code"]) == (500, "request_poisoned")
    assert failed.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("unavailable", 503, "engine_recovering"),
        ("poison", 500, "request_poisoned"),
        ("", 500, "embedding_failed"),
    ],
)
async def test_an_embedding_s_error_tells_whether_to_try_again(server, kind, status, code):
    server.engine.raises = embedding_error("no luck", kind)
    failed = await server.post("/v1/embeddings", {"input": "Hi"})
    assert (failed.status, failed.error["code"]) == (status, code)
    assert ("Retry-After" in failed.headers) == (status == 503)


async def test_openai_s_client_does_not_repeat_a_poison_request(server):
    server.engine.fail_after, server.engine.fail_kind = 0, "poison"
    url = str(server.client.make_url("/v1"))
    client = openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=3)
    async with client:
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model="fake/model", prompt="Hi")
    assert len(server.engine.calls) == 1


async def test_the_access_log_says_how_often_a_request_was_resumed(server, caplog):
    caplog.set_level(logging.DEBUG, "gllm.frontend.middleware.observe")
    await server.chat()
    server.engine.num_resumptions = 2
    await server.chat()
    plain, resumed = (record for record in caplog.records if "tokens" in record.message)
    assert "resumed" not in plain.message
    assert resumed.message.endswith(", resumed 2 times")
    assert "resumptions" not in plain.fields
    assert resumed.fields["resumptions"] == 2


async def test_a_trace_says_how_often_a_request_was_resumed(engine):
    async with traced(engine) as (server, collector):
        await server.chat()
        engine.num_resumptions = 1
        await server.stream(TEXT_PATH)
    counts = [values(span.attributes).get("gllm.resumptions") for span in collector.spans]
    assert counts == [None, 1]


async def test_metrics_of_recoveries(server):
    model = 'model_name="fake/model"'
    before = await metrics(server)
    for cause in ("killed", "failed", "frozen", "lost", "rebalanced"):
        assert before[f'gllm:recoveries_total{{cause="{cause}",{model}}}'] == 0
    assert before[f"gllm:epoch{{{model}}}"] == 1
    assert before[f"gllm:recovering_seconds{{{model}}}"] == 0
    engine = server.engine
    engine.recoveries, engine.recovery_seconds = {"killed": 2, "frozen": 1}, [0.4, 2.0, 1000.0]
    engine.recovery_phase_seconds = {"load": 1.5}
    engine.num_resumed_requests, engine.num_stale_frames = 5, 7
    engine.recovering_since = time.monotonic() - 3
    found = await metrics(server)
    assert found[f'gllm:recoveries_total{{cause="killed",{model}}}'] == 2
    assert found[f'gllm:recoveries_total{{cause="lost",{model}}}'] == 0
    name = "gllm:recovery_seconds"
    assert found[f'{name}_bucket{{le="0.5",{model}}}'] == 1
    assert found[f'{name}_bucket{{le="2.5",{model}}}'] == 2
    assert found[f'{name}_bucket{{le="320.0",{model}}}'] == 2
    assert found[f'{name}_bucket{{le="+Inf",{model}}}'] == 3
    assert found[f"{name}_sum{{{model}}}"] == 1002.4
    phase_seconds = "gllm:recovery_phase_seconds_total"
    assert found[f'{phase_seconds}{{{model},phase="load"}}'] == 1.5
    assert found[f'{phase_seconds}{{{model},phase="warm_up"}}'] == 0
    assert found[f"gllm:resumed_requests_total{{{model}}}"] == 5
    assert found[f"gllm:stale_frames_total{{{model}}}"] == 7
    assert found[f"gllm:epoch{{{model}}}"] == 4
    assert found[f"gllm:recovering_seconds{{{model}}}"] >= 3
