"""The client against a fake server: what is sent, when output came, every way to fail."""

from typing import Any

import pytest

from gllm.commands.bench.client import RequestResult, open_session, request_body, send
from gllm.commands.bench.load import PlannedRequest
from gllm.commands.bench.options import LoadConfig, ServeConfig
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
