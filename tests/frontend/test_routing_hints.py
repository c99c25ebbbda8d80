"""Objectives and sessions of requests, from body, headers and flags, on their way to the engine."""

import pytest

from gllm.engine.interface import EngineUnavailableError, OverloadedError
from gllm.frontend.fields.generation import SamplingFields
from gllm.frontend.routing_hints import read_routing_hints
from gllm.options.slo import Slo
from tests.frontend.conftest import serving
from tests.frontend.test_conventions import scrape
from tests.support.http.endpoint_bodies import EXAMPLES

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
TTFT, TPOT = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"


async def hints(server, path=PATHS[1], headers=None, **fields):
    """Return the objective and the session with which a request reached the engine."""
    answer = await server.post(path, {**EXAMPLES[path], **fields}, headers=headers or {})
    assert answer.status == 200, answer.json
    call = server.engine.calls[-1]
    return call.slo, call.session


@pytest.mark.parametrize("path", PATHS)
async def test_every_api_takes_objectives_and_sessions(server, path):
    assert await hints(server, path) == (None, "")
    given = {"slo_ttft": 0.5, "slo_tpot": 0.02, "prompt_cache_key": "mine"}
    assert await hints(server, path, **given) == (Slo(0.5, 0.02), "mine")
    headers = {TTFT: "500", TPOT: "20", "x-session-id": "mine"}
    assert await hints(server, path, headers) == (Slo(0.5, 0.02), "mine")


@pytest.mark.parametrize(
    ("headers", "slo"),
    [
        ({"x-slo-ttft-ms": "250"}, Slo(0.25, None)),
        ({"x-slo-tpot-ms": "12.5"}, Slo(None, 0.0125)),
        ({TTFT: "100", "x-slo-ttft-ms": "250"}, Slo(0.1, None)),
        ({TTFT.upper(): " 100 "}, Slo(0.1, None)),
        ({TTFT: ""}, None),
    ],
)
async def test_headers_of_objectives(server, headers, slo):
    assert (await hints(server, headers=headers))[0] == slo


@pytest.mark.parametrize("stream", [False, True])
async def test_a_header_that_is_no_time_is_refused_by_name(server, stream):
    body = {"prompt": "Hi", "stream": stream}
    for header in (TTFT, TPOT, "x-slo-ttft-ms", "x-slo-tpot-ms"):
        for value in ("soon", "0", "-1", "nan", "inf", "1e400"):
            answer = await server.post(PATHS[1], body, headers={header: value})
            assert (answer.status, answer.error["param"]) == (400, header), value
    assert server.engine.calls == []


async def test_fields_override_headers_and_headers_flags(engine):
    async with serving(engine, slo_ttft=3, slo_tpot=2.0) as server:
        assert (await hints(server))[0] == Slo(3.0, 2.0)
        headers = {TTFT: "1000", "x-session-token": "header"}
        assert (await hints(server, headers=headers))[0] == Slo(1.0, 2.0)
        given = {"slo_ttft": 0.5, "prompt_cache_key": "field"}
        assert await hints(server, headers=headers, **given) == (Slo(0.5, 2.0), "field")


async def test_the_client_is_the_number_of_its_key(engine):
    keys = "first-key-of-the-server", "other-key-of-the-server"
    async with serving(engine, api_key=keys) as server:
        for number, key in enumerate(keys):
            await hints(server, headers={"Authorization": f"Bearer {key}"})
            assert server.engine.calls[-1].client == f"key {number}"


def test_a_session_that_is_no_utf_8_is_text():
    """Messages to the driver encode it."""
    hints = read_routing_hints({"x-session-id": "a\udcffb"}, SamplingFields(), Slo())
    assert hints.session == "a?b"


@pytest.mark.parametrize("name", ["x-session-token", "x-session-id", "X-Dynamo-Session-ID"])
async def test_headers_of_sessions(server, name):
    assert (await hints(server, headers={name: "a b/c"}))[1] == "a b/c"
    assert len((await hints(server, headers={name: "x" * 5000}))[1]) == 1024


@pytest.mark.parametrize(
    ("error", "status", "dropped"),
    [
        (OverloadedError("no engine can meet it", "rejected-saturated", 7), 429,
         "rejected-saturated"),
        (EngineUnavailableError("no_engines", "nobody is there", 7), 503, "rejected-no-endpoints"),
        (EngineUnavailableError("no_engines", "it waited", 7, "rejected-ttl-expired"), 503,
         "rejected-ttl-expired"),
        (EngineUnavailableError("full", "it is full", 7), 503, "rejected-saturated"),
        (EngineUnavailableError("draining", "it drains", 7), 503, None),
    ],
)  # fmt: skip
async def test_refused_requests_say_why_and_when_to_come_back(server, error, status, dropped):
    server.engine.raises = error
    for path in PATHS:
        answer = await server.post(path, EXAMPLES[path])
        assert (answer.status, answer.headers["Retry-After"]) == (status, "7"), path
        assert answer.headers.get("x-llm-d-request-dropped-reason") == dropped, path
        assert answer.error["message"] == error.message, path


async def objectives(server):
    """Return the counts of choices by objective and by whether it was met, without zeros."""
    families = await scrape(server)
    return {
        (sample.labels["objective"], sample.labels["met"]): sample.value
        for sample in families["gllm:slo_choices"].samples
        if sample.name.endswith("_total") and sample.value
    }


async def test_met_and_missed_objectives_are_counted(server):
    await server.complete()
    assert await objectives(server) == {}
    await server.complete(slo_ttft=60, slo_tpot=1e-9, n=2)
    assert await objectives(server) == {("ttft", "true"): 2, ("tpot", "false"): 2}
    await server.complete(slo_ttft=1e-9, max_tokens=1, slo_tpot=60)
    expected = {("ttft", "true"): 2, ("ttft", "false"): 1, ("tpot", "false"): 2}
    assert await objectives(server) == expected
    server.engine.fail_after = 0
    await server.complete(slo_ttft=60)
    assert await objectives(server) == {**expected, ("ttft", "false"): 2}
