"""Streams: format, order, errors in the middle, slow and vanishing clients."""

import asyncio
import socket
from urllib.parse import urlsplit

import openai
import pytest

from gllm.engine.interface import EngineUnavailableError, OutputDelta
from gllm.messages.sampling import ALL_TOKENS_BANNED
from tests.frontend.conftest import CHAT, CHAT_PATH, TEXT_PATH, serving
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.sse import events_of


async def until(condition, seconds=5) -> None:
    """Wait for something that has to happen soon."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def test_chat_events(server):
    first, *middle, last = await server.stream(CHAT_PATH)
    assert first["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    for event in [first, *middle, last]:
        assert event["object"] == "chat.completion.chunk"
        head = ("id", "created", "model")
        assert [event[name] for name in head] == [first[name] for name in head]
        assert "usage" not in event
    texts = [event["choices"][0]["delta"]["content"] for event in middle]
    assert "".join(texts) == server.engine.reply
    assert all(texts)
    assert not any("\ufffd" in text for text in texts)
    assert last["choices"] == [
        {
            "index": 0,
            "delta": {},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]


async def test_completion_events(server):
    events = await server.stream(TEXT_PATH, max_tokens=64)
    assert all(event["object"] == "text_completion" for event in events)
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == server.engine.reply
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
async def test_usage_comes_last(server, path):
    *events, last = await server.stream(path, stream_options={"include_usage": True})
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert all("usage" not in event for event in events)


async def test_continuous_usage(server):
    events = await server.stream(TEXT_PATH, stream_options={"continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == len(server.engine.tokenizer.encode(server.engine.reply))


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
async def test_token_ids_of_every_choice(server, path):
    events = await server.stream(path, n=3, max_tokens=5, return_token_ids=True)
    ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for choice in (event["choices"][0] for event in events):
        ids[choice["index"]] += choice.get("token_ids", [])
    expected = server.engine.tokenizer.encode(server.engine.reply)[:5]
    assert ids == {0: expected, 1: expected, 2: expected}


async def test_nothing_of_a_stop_string_leaks(server):
    events = await server.stream(CHAT_PATH, stop="how are")
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == "Hello wörld 🎉, "
    assert events[-1]["choices"][0]["stop_reason"] == "how are"


async def test_failed_choice_in_mid_stream(server):
    server.engine.fail_after = 3
    *events, error = await server.stream(CHAT_PATH)
    assert error["error"]["message"] == "logits are not finite"
    assert error["error"]["code"] == "generation_failed"
    assert len(events) >= 2


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
async def test_choice_that_fails_before_all_output_has_a_status(server, path):
    server.engine.fail_after = 0
    body = {**CHAT, "prompt": "Hi", "stream": True}
    answer = await server.post(path, body)
    assert (answer.status, answer.error["code"]) == (500, "generation_failed")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"allowed_token_ids": [5], "response_format": {"type": "json_object"}},
            "allowed_token_ids",
        ),
        ({"bad_words": ["{"], "structured_outputs": {"choice": ["{}"]}}, "bad_words"),
        ({"min_tokens": 2, "stop_token_ids": [5], "allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"response_format": {"type": "json_object"}}, None),
    ],
)
@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
async def test_fields_that_forbid_every_token_are_an_error_of_the_client(
    server, path, fields, param
):
    """At any position; without such fields it is the server's."""
    status = 500 if param is None else 400
    server.engine.fail_text = ALL_TOKENS_BANNED
    server.engine.fail_after = 0
    for stream in (False, True):
        answer = await server.post(path, {**CHAT, "prompt": "Hi", "stream": stream, **fields})
        assert (answer.status, answer.error["param"]) == (status, param)
    server.engine.fail_after = 3
    *_, error = await server.stream(path, **fields)
    assert error["error"]["param"] == param
    assert error["error"]["code"] == ("generation_failed" if param is None else "invalid_value")


class FailingEngine(FakeEngine):
    """Says something and fails at once."""

    async def script(self, prompt, params):
        yield OutputDelta(0, "Hel", [40])
        yield OutputDelta(0, "lo", [41], "error", None, "the engine is gone")


async def test_what_was_said_before_a_failure_is_shown(tokenizer):
    """A slow reader gets both at once."""
    async with serving(FailingEngine(tokenizer)) as server:
        *events, error = await server.stream(TEXT_PATH)
    assert "".join(event["choices"][0]["text"] for event in events) == "Hello"
    assert error["error"]["message"] == "the engine is gone"


async def test_raising_engine_in_mid_stream(server, caplog):
    server.engine.raises_after = 2
    *_, error = await server.stream(CHAT_PATH)
    assert error["error"]["code"] == "internal_error"
    assert "secret" not in str(error)
    assert "secret" in caplog.text


async def test_refusal_before_the_first_delta_has_its_status(server):
    server.engine.raises = EngineUnavailableError("dead", "gone", 7)
    answer = await server.chat(stream=True)
    assert (answer.status, answer.error["code"]) == (503, "engine_dead")
    assert answer.headers["Retry-After"] == "7"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
async def test_disconnect_aborts_at_once(server, path, stream):
    server.engine.delay = 0.05
    server.engine.reply = "word " * 200
    body = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    post = asyncio.create_task(server.client.post(path, json={**body, "max_tokens": 200, "n": 2}))
    await until(lambda: server.engine.calls)
    if stream:
        response = await post
        await response.content.readany()
        response.close()
    else:
        post.cancel()
    call = server.engine.calls[0]
    await until(lambda: call.closed)
    assert not call.finished
    await server.idle()


async def test_slow_reader_gets_fewer_larger_events(server):
    server.engine.reply = "x" * 8000 + " end"
    server.engine.max_model_len = 100_000
    tokens = 6000
    server.engine.tokenizer = BulkyTokenizer(server.engine.tokenizer, tokens)
    url = urlsplit(str(server.client.make_url(TEXT_PATH)))
    body = f'{{"prompt": [5], "stream": true, "n": 2, "max_tokens": {tokens}}}'.encode()
    with socket.create_connection((url.hostname, url.port)) as raw:
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        head = f"POST {TEXT_PATH} HTTP/1.0\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(raw, head.encode() + body)
        await until(lambda: server.engine.calls and server.engine.calls[0].finished, 60)
        received, buffered = b"", 0
        while piece := await loop.sock_recv(raw, 2**20):
            received += piece
            open_ones = [one.transport for one in server.connections if one.transport]
            buffered = max([buffered, *(one.get_write_buffer_size() for one in open_ones)])
    assert buffered < 2**20, "what is not read waits as deltas, not as bytes of a socket"
    events = events_of(received.split(b"\r\n\r\n", 1)[1])
    assert sum(len(event["choices"][0]["text"]) for event in events) == 2 * tokens * 500
    assert len(events) < tokens


@pytest.fixture
async def lively(engine):
    """A server that looks at its streams every 50 ms, the time after which it gives up writing."""
    async with serving(engine, write_timeout=0.05) as server:
        yield server


async def test_silence_is_filled_with_comments(lively):
    server = lively
    server.engine.delay = 0.2
    body = {"prompt": "Hi", "stream": True, "max_tokens": 4}
    async with server.client.post(TEXT_PATH, json=body) as response:
        assert response.status == 200
        received = (await response.read()).decode()
    blocks = received.removesuffix("\n\n").split("\n\n")
    comments = [i for i, block in enumerate(blocks) if block == ": keep-alive"]
    assert comments[0] == 0, "the stream opened before there was anything to say"
    assert len(comments) >= 2
    left = [block for block in blocks if block != ": keep-alive"]
    events = events_of("\n\n".join([*left, ""]).encode())
    assert "".join(event["choices"][0]["text"] for event in events) == server.engine.reply[:8]


async def test_what_fails_after_a_silence_is_an_event(lively, caplog):
    server = lively
    server.engine.delay, server.engine.raises_after = 0.3, 0
    async with server.client.post(CHAT_PATH, json={**CHAT, "stream": True}) as response:
        assert response.status == 200
        received = (await response.read()).decode()
    left = [block for block in received.split("\n\n") if block != ": keep-alive"]
    assert left != received.split("\n\n")
    *_, error = events_of("\n\n".join(left).encode())
    assert error["error"]["code"] == "internal_error"


async def test_openais_client_does_not_see_comments(lively):
    server = lively
    server.engine.delay = 0.12
    url = str(server.client.make_url("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="fake/model", stream=True, max_tokens=5, **CHAT
        )
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) == server.engine.reply[:9]


class BulkyTokenizer:
    """Every token is much text, so that sockets fill up."""

    special_token_ids: frozenset[int] = frozenset()
    is_byte_level = True

    def __init__(self, inner, tokens, size=500):
        self.vocab_size = inner.vocab_size
        self._tokens = tokens
        self._size = size

    def encode(self, text):
        return [7] * self._tokens

    def id_to_token(self, token_id):
        return "x"

    def token_text(self, token_id):
        return "x" * self._size
