"""The endpoints that are not about generating."""

import io
import logging

import pytest

from gllm import __version__
from gllm.frontend.routes.registry import ENDPOINTS
from gllm.observability.logs import DeduplicatingHandler
from gllm.text.chat.template import ChatTemplate
from gllm.text.tokenizer import Tokenizer
from tests.support.text.tokenizers import byte_level


async def get(server, path):
    async with server.client.get(path) as response:
        return response.status, await response.json()


async def test_models(server):
    model = {
        "id": "fake/model",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "gllm",
        "root": "fake/model",
        "parent": None,
        "max_model_len": 256,
        "vocab_size": server.engine.tokenizer.vocab_size,
        "reasoning_controls": [],
    }
    assert await get(server, "/v1/models") == (200, {"object": "list", "data": [model]})
    assert await get(server, "/v1/models/fake/model") == (200, model)
    status, body = await get(server, "/v1/models/other")
    assert (status, body["error"]["param"]) == (404, "model")


async def test_a_model_names_what_controls_its_reasoning(server):
    """Clients, as the chat page, offer a switch only where it has an effect."""
    source = (
        "{% if enable_thinking is defined and enable_thinking %}{{ reasoning_effort }}{% endif %}"
    )
    server.engine.tokenizer = Tokenizer(byte_level(), ChatTemplate(source, {}))
    _, body = await get(server, "/v1/models")
    assert body["data"][0]["reasoning_controls"] == ["enable_thinking", "reasoning_effort"]
    server.engine.tokenizer = Tokenizer(byte_level(), None)
    _, body = await get(server, "/v1/models")
    assert body["data"][0]["reasoning_controls"] == []


async def test_version(server):
    assert await get(server, "/version") == (200, {"version": __version__})


@pytest.mark.parametrize(
    ("state", "well", "health", "ready"),
    [
        ("ready", True, 200, 200),
        ("ready", False, 503, 200),
        ("loading", True, 503, 503),
        ("recovering", True, 200, 503),
        ("recovering", False, 200, 503),
        ("draining", True, 200, 503),
        ("sleeping", True, 200, 503),
        ("dead", True, 503, 503),
    ],
)
async def test_health_and_ready(server, state, well, health, ready):
    server.engine.state, server.engine.well = state, well
    assert (await get(server, "/health"))[0] == health
    assert (await get(server, "/ready"))[0] == ready


async def test_an_engine_that_no_router_has_is_healthy_but_not_ready(server):
    server.engine.num_routers, server.engine.unattached_cause = 0, "the router refuses it"
    assert (await get(server, "/health"))[0] == 200
    status, body = await get(server, "/ready")
    assert (status, body["error"]["message"]) == (503, "the router refuses it")
    assert (await metrics(server))['gllm:attached_routers{model_name="fake/model"}'] == 0
    server.engine.num_routers, server.engine.unattached_cause = 1, ""
    assert (await get(server, "/ready"))[0] == 200


async def metrics(server):
    async with server.client.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        lines = (await response.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def test_metrics(server):
    await server.chat(n=2, max_tokens=5)
    await server.complete(stop="Hello")
    found = await metrics(server)
    model = 'model_name="fake/model"'
    prompts = sum(len(call.prompt) for call in server.engine.calls)
    assert found[f"gllm:num_requests_running{{{model}}}"] == 2
    assert found[f"gllm:kv_cache_usage_perc{{{model}}}"] == 0.25
    assert found[f"gllm:prompt_tokens_total{{{model}}}"] == prompts
    assert found[f"gllm:generation_tokens_total{{{model}}}"] >= 11
    assert found[f'gllm:request_success_total{{finished_reason="length",{model}}}'] == 2
    assert found[f'gllm:request_success_total{{finished_reason="stop",{model}}}'] == 1
    assert found[f"gllm:time_to_first_token_seconds_count{{{model}}}"] == 2
    assert found[f"gllm:e2e_request_latency_seconds_count{{{model}}}"] == 3
    assert found[f"gllm:inter_token_latency_seconds_count{{{model}}}"] >= 8
    assert found[f'gllm:stage_busy_seconds_total{{{model},stage="0"}}'] == 3.0
    assert found[f'gllm:stage_compilations_total{{{model},stage="1"}}'] == 7
    assert found[f'gllm:stage_bubble_seconds_total{{{model},stage="1"}}'] == 1.0
    assert found[f'gllm:stage_bubble_share{{{model},stage="0"}}'] == 0.125
    assert found[f"gllm:pipeline_work_seconds_total{{{model}}}"] == 4.0
    steps = f'gllm:iteration_tokens_total_bucket{{le="8.0",{model}}}'
    assert found[steps] == 6
    assert found[f"gllm:request_queue_time_seconds_count{{{model}}}"] == 2
    assert found[f"gllm:request_prefill_time_seconds_count{{{model}}}"] == 2
    for name in ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions"):
        assert f"gllm:{name}_total{{{model}}}" in found


async def test_head_of_metrics(server):
    async with server.client.head("/metrics") as response:
        assert response.status == 200
        assert await response.read() == b""


async def test_two_servers_share_no_metrics(server, engine):
    from gllm.frontend.metrics import Metrics

    await server.chat()
    assert b"gllm:prompt_tokens_total" in Metrics(engine).render()
    assert b'gllm:prompt_tokens_total{model_name="fake/model"} 0.0' in Metrics(engine).render()


@pytest.mark.parametrize(
    "path",
    [
        one.path
        for one in ENDPOINTS
        if one.method == "GET"
        and not one.unsupported_reason
        # They need a router, and an engine with KV transfers.
        and one.path not in ("/engines", "/workload", "/kv_handoffs/{room}")
    ],
)
async def test_head_answers_as_get_without_a_body(server, path):
    await server.post("/v1/responses", {"input": "Hi", "request_id": "one"})
    url = path.format(path="app.js", model="fake/model", response_id="resp_one")
    async with server.client.get(url) as response:
        expected, kind = response.status, response.content_type
        await response.read()
    async with server.client.head(url) as response:
        assert (response.status, response.content_type) == (expected, kind) == (200, kind)
        assert int(response.headers["Content-Length"]) > 0
        assert await response.read() == b""


async def test_head_of_health_says_what_get_says(server):
    server.engine.state = "dead"
    async with server.client.head("/health") as response:
        assert response.status == 503


async def test_fields_without_meaning_do_not_flood_the_log(server):
    stream = io.StringIO()
    handler, log = DeduplicatingHandler(stream), logging.getLogger("gllm")
    log.addHandler(handler)
    try:
        for _ in range(20):
            assert (await server.chat(mirostat=1)).status == 200
            assert (await server.chat(typical_p=0.5, mirostat=1)).status == 200
    finally:
        log.removeHandler(handler)
    told = [line for line in stream.getvalue().splitlines() if "unknown fields" in line]
    assert len(told) == 2
    assert ["typical_p" in line for line in told] == [False, True]
