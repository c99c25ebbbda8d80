"""The client against a fake server: waiting, the load, what is sent, times, every failure."""

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from gllm.commands.bench.client import (
    RequestResult,
    ServedModel,
    TargetServerError,
    open_session,
    request_body,
    run_load,
    send,
    wait_until_ready,
)
from gllm.commands.bench.load import PlannedRequest
from gllm.commands.bench.options import LoadConfig, ServeConfig
from gllm.observability.latency import RequestTimeline
from tests.support.http.fake_server import DONE, FakeServer, event, piece, running, usage

CONFIG = ServeConfig()
PLANNED = PlannedRequest(0.0, [1, 2, 3], 3, 4)


async def ask(server: FakeServer, config: ServeConfig = CONFIG) -> RequestResult:
    async with running(server) as url, open_session(config, "a-key") as session:
        body = request_body(config, "fake", 0, PLANNED)
        return await send(session, url + config.endpoint, body, PLANNED.prompt_tokens)


async def test_every_chunk_with_tokens_has_its_time() -> None:
    writes = [piece("a"), piece("b"), piece("c", "length"), usage(3, 3), DONE]
    outcome = await ask(FakeServer(writes, pause=0.01))
    line = outcome.timeline
    assert (outcome.failure, outcome.prompt_tokens, line.num_tokens) == ("", 3, 3)
    assert "".join(outcome.text_parts) == "abc"
    assert line.arrival < line.times[0] < line.times[1] < line.times[2] <= outcome.end
    assert line.tpot == pytest.approx((line.times[2] - line.times[0]) / 2)
    # Each write came after its own pause.
    assert all(gap > 0.005 for gap in line.itl)


async def test_coalesced_tokens_are_counted_by_the_server() -> None:
    writes = [piece("a"), piece("bcdef"), piece("gh", "length"), usage(3, 8), DONE]
    outcome = await ask(FakeServer(writes, pause=0.01))
    assert (outcome.timeline.num_tokens, len(outcome.timeline.times)) == (8, 3)
    span = outcome.timeline.times[2] - outcome.timeline.times[0]
    assert outcome.timeline.tpot == pytest.approx(span / 7)


async def test_without_a_count_chunks_or_ids_are_counted() -> None:
    writes = [piece("a"), piece("bc"), piece("", "stop"), DONE]
    assert (await ask(FakeServer(writes))).timeline.num_tokens == 2
    writes = [piece("a", token_ids=[1]), piece("", token_ids=[2, 3]), piece("b", "stop"), DONE]
    assert (await ask(FakeServer(writes))).timeline.num_tokens == 4


async def test_chat_chunks_and_continuous_counts() -> None:
    def delta(count: int, **fields: Any) -> bytes:
        counted = {"prompt_tokens": 3, "completion_tokens": count}
        return event(choices=[{"delta": fields, "finish_reason": None}], usage=counted)

    writes = [
        delta(0, role="assistant", content=""),
        delta(1, reasoning_content="hm"),
        delta(4, content="a"),
        delta(6, tool_calls=[{"index": 0}]),
        event(choices=[{"delta": {}, "finish_reason": "stop"}]),
    ]
    outcome = await ask(FakeServer(writes), ServeConfig(endpoint="/v1/chat/completions"))
    # The role alone is no output; a finish reason ends the stream as [DONE] does.
    assert (outcome.failure, outcome.timeline.num_tokens, len(outcome.timeline.times)) == ("", 6, 3)
    assert "".join(outcome.text_parts) == "hma"


@pytest.mark.parametrize(
    ("server", "failure", "detail"),
    [
        (FakeServer(status=503), "HTTP 503", "the fake refuses"),
        (FakeServer(status=400), "HTTP 400", "the fake refuses"),
        (FakeServer([piece("a")], cut=True), "cut off", ""),
        (FakeServer([piece("a")]), "cut off", "without [DONE]"),
        (
            FakeServer([piece("a"), event(error={"message": "not finite"}), DONE]),
            "error in the stream",
            "not finite",
        ),
        (FakeServer([b"data: {nothing\n\n"]), "invalid event", ""),
        (FakeServer([b'data: {"choices": 3}\n\n']), "invalid event", "choices"),
    ],
)
async def test_failures_by_kind(server: FakeServer, failure: str, detail: str) -> None:
    outcome = await ask(server)
    assert outcome.failure == failure
    assert detail in outcome.detail
    assert outcome.detail
    assert outcome.end >= outcome.timeline.arrival


async def test_a_slow_server_meets_the_time_out() -> None:
    outcome = await ask(FakeServer([piece("a")], pause=30), ServeConfig(request_timeout=0.1))
    assert outcome.failure == "timeout"


async def test_nobody_there() -> None:
    async with open_session(CONFIG, None) as session:
        outcome = await send(session, "http://127.0.0.1:9/v1/completions", b"{}", 3)
    assert outcome.failure == "connection"
    assert "127.0.0.1" in outcome.detail


async def test_a_server_that_does_not_stream() -> None:
    outcome = await ask(FakeServer([b'{"choices": []}'], content_type="application/json"))
    assert (outcome.failure, "application/json" in outcome.detail) == ("no stream", True)


async def test_what_is_sent() -> None:
    server = FakeServer()
    await ask(server)
    assert server.bodies == [
        {
            "model": "fake",
            "prompt": [1, 2, 3],
            "max_tokens": 4,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    assert server.headers[0]["Authorization"] == "Bearer a-key"


async def test_what_flags_change_of_it() -> None:
    server = FakeServer()
    config = ServeConfig(
        endpoint="/v1/chat/completions",
        temperature=0.5,
        ignore_eos=False,
        extra_body={"top_k": 3, "max_tokens": 9},
        load=LoadConfig(seed=40),
    )
    async with running(server) as url, open_session(config, None) as session:
        body = request_body(config, "fake", 2, PlannedRequest(0.0, "Hi", 3, 4))
        await send(session, url + config.endpoint, body, 1)
    (sent,) = server.bodies
    assert sent["messages"] == [{"role": "user", "content": "Hi"}]
    assert (sent["temperature"], sent["seed"], sent["top_k"], sent["max_tokens"]) == (0.5, 42, 3, 9)
    assert not {"ignore_eos", "prompt"} & set(sent)
    assert "Authorization" not in server.headers[0]


# Events.


async def described(
    server: FakeServer, model: str | None = None, seconds: float = 20.0
) -> ServedModel:
    async with running(server) as url, open_session(ServeConfig(), None) as session:
        return await wait_until_ready(session, url, model, seconds, poll_seconds=0.001)


async def test_the_first_model_and_its_vocabulary() -> None:
    assert await described(FakeServer()) == ServedModel("fake", 50)
    assert await described(FakeServer(), "other") == ServedModel("other", 256)
    plain = FakeServer(models={"data": [{"id": "plain"}]})
    assert await described(plain) == ServedModel("plain", 256)


async def test_a_server_that_loads_is_waited_for() -> None:
    server = FakeServer(refusals=[503, 500, 404])
    assert await described(server) == ServedModel("fake", 50)
    assert server.refusals == []


async def test_one_that_never_gets_ready() -> None:
    with pytest.raises(TargetServerError, match=r"no server is ready at .* within 0\.05 s .*503"):
        await described(FakeServer(refusals=[503] * 1000), seconds=0.05)


@pytest.mark.parametrize("models", [{"data": []}, {}, 3])
async def test_a_server_without_a_list_of_models(models: object) -> None:
    with pytest.raises(TargetServerError, match="--model"):
        await described(FakeServer(models=models))
    assert await described(FakeServer(models=models), "mine") == ServedModel("mine", 256)


async def test_a_key_is_asked_for() -> None:
    with pytest.raises(TargetServerError, match="--api-key"):
        await described(FakeServer(models_status=401))


def outcome() -> RequestResult:
    return RequestResult(RequestTimeline(time.monotonic()), 1)


async def test_no_request_is_sent_before_its_time() -> None:
    sent: list[int] = []

    async def send(place: int) -> RequestResult:
        sent.append(place)
        return outcome()

    arrivals = [0.0, 0.0, 0.02, 0.05]
    measured = await run_load(arrivals, send, None, progress=False)
    assert sent == [0, 1, 2, 3]
    assert not measured.interrupted
    for place, arrival in enumerate(arrivals):
        assert measured.outcomes[place].timeline.arrival - measured.begin >= arrival
    assert measured.seconds >= arrivals[-1]


@pytest.mark.parametrize("limit", [1, 3, None])
async def test_the_limit_on_requests_under_way(limit: int | None) -> None:
    sent: list[int] = []
    under_way = most = 0

    async def send(place: int) -> RequestResult:
        nonlocal under_way, most
        sent.append(place)
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1
        return outcome()

    await run_load([0.0] * 10, send, limit, progress=False)
    assert most == (limit or 10)
    assert sent == list(range(10))


async def test_ctrl_c_leaves_what_was_measured() -> None:
    cancelled: list[int] = []

    async def send(place: int) -> RequestResult:
        if place == 2:
            os.kill(os.getpid(), signal.SIGINT)
        if place >= 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(place)
                raise
        return outcome()

    measured = await run_load([0.0, 0.0, 0.01, 0.01, 60.0], send, None, progress=False)
    assert measured.interrupted
    assert set(measured.outcomes) == {0, 1}
    assert sorted(cancelled) == [2, 3]


async def test_an_error_of_ours_is_not_hidden() -> None:
    async def send(place: int) -> RequestResult:
        raise RuntimeError("a mistake")

    with pytest.raises(ExceptionGroup):
        await run_load([0.0], send, None, progress=False)
