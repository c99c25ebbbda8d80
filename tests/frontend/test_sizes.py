"""What is too large is refused by name; what is counted is counted exactly."""

import gzip
import json
import zlib

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.frontend.errors import ApiError
from gllm.frontend.fields.parsing import decompress, split_strings
from gllm.options.limits import MAX_JSON_NUMBERS, MAX_JSON_VALUES
from tests.frontend.conftest import CHAT, CHAT_PATH, serving
from tests.support.examples import num_examples

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
"""aiohttp's client would rather send a file."""

TOO_LARGE = {
    "stop": "s" * (7 * 2**20),
    "bad_words": ["w" * 2**20],
    "stop_token_ids": [1] * 200_000,
    "logit_bias": {str(i): 1 for i in range(5000)},
    "allowed_token_ids": [1] * 70_000,
    "tools": [{"type": "function", "function": {"name": "f", "description": "d" * 2**20}}],
    "messages": [{"role": "user", "content": "x"}] * 5000,
}


@pytest.mark.parametrize("name", TOO_LARGE)
async def test_a_field_that_is_too_large_is_named(engine, name):
    async with serving(engine, max_body_bytes=2**23, max_choices=128) as server:
        answer = await server.chat(**{"n": 128, name: TOO_LARGE[name]})
    assert (answer.status, answer.error["param"]) == (400, name)
    assert any(char.isdigit() for char in answer.error["message"])
    assert engine.calls == []


async def test_log_probabilities_of_very_many_choices(engine):
    engine.reply = "Hello"
    async with serving(engine, max_choices=128) as server:
        answer = await server.chat(n=128, logprobs=True, top_logprobs=4)
        assert (answer.status, answer.error["param"]) == (400, "n")
        answer = await server.complete(n=26, logprobs=19)
        assert (answer.status, answer.error["param"]) == (400, "n")
        answer = await server.chat(n=128, logprobs=True, top_logprobs=3)
    assert answer.status == 200
    assert all(choice["logprobs"]["content"] for choice in answer.json["choices"])


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.full), True])
async def test_many_log_probabilities_are_those_of_few(engine, stream):
    """Written in a thread, choice by choice the same as an answer with one choice."""
    engine.reply *= 8
    body = {"prompt": list(range(100, 130)), "logprobs": 20, "echo": True, "max_tokens": 200}
    async with serving(engine, max_choices=24) as server:
        async with server.client.post("/v1/completions", json={**body, "n": 1}) as response:
            (one,) = (await response.json())["choices"]
        many = {**body, "n": 24, "stream": stream}
        async with server.client.post("/v1/completions", json=many) as response:
            text = await response.text()
    if not stream:
        for choice in json.loads(text)["choices"]:
            assert {**choice, "index": 0} == one
        return
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    scores = [choice["logprobs"] for event in events for choice in event["choices"]]
    tokens = [token for score in scores if score for token in score["tokens"]]
    assert len(tokens) == 24 * len(one["logprobs"]["tokens"])


async def test_metadata_of_responses(server):
    for metadata in (dict.fromkeys(map(str, range(17)), "v"), {"k" * 65: "v"}, {"k": "v" * 513}):
        answer = await server.post("/v1/responses", {"input": "Hi", "metadata": metadata})
        assert (answer.status, answer.error["param"]) == (400, "metadata")


async def test_prompt_log_probabilities_of_a_long_prompt(engine):
    engine.max_model_len = 10**6
    async with serving(engine, max_body_bytes=2**20) as server:
        answer = await server.complete(prompt=[5] * 13_000, prompt_logprobs=20, max_tokens=1)
        assert (answer.status, answer.error["param"]) == (400, "prompt_logprobs")


async def test_a_prompt_too_long_by_its_characters(engine, monkeypatch):
    async with serving(engine, max_body_bytes=2**20) as server:
        text = "x" * 500_000
        for path, body, param in (
            ("/v1/completions", {"prompt": text}, "prompt"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
            ("/v1/responses", {"input": text}, "input"),
            ("/v1/embeddings", {"input": text}, "input"),
        ):
            answer = await server.post(path, body)
            assert (answer.status, answer.error["param"]) == (400, param)
            assert answer.error["code"] == "context_length_exceeded"
            assert "at least" in answer.error["message"]
        cut = await server.complete(prompt="x" * 5000, truncate_prompt_tokens=5)
        assert cut.status == 200


async def test_values_in_a_large_body(engine):
    async with serving(engine, max_body_bytes=2**23) as server:
        for value in (
            "[]," * MAX_JSON_VALUES,
            '"",' * MAX_JSON_VALUES,
            "1," * (MAX_JSON_NUMBERS + 9),
        ):
            body = f'{{"messages": [{value}1]}}'.encode()
            answer = await server.post(CHAT_PATH, body)
            assert (answer.status, answer.error["code"]) == (400, "body_too_complex")
        text = '",[{' * 200_000
        answer = await server.post(CHAT_PATH, {**CHAT, "user": text})
        assert answer.status == 200, "within a string they are no values"
        answer = await server.chat(**{f"field_{i}": 1 for i in range(1100)})
        assert (answer.status, answer.error["code"]) == (400, "body_too_complex")


values = st.recursive(
    st.none() | st.integers() | st.text('\\",[{a\n', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('\\"a'), inner, max_size=3),
    max_leaves=12,
)


def counted(value):
    """(strings, lists and objects; commas) of a JSON value."""
    if isinstance(value, str):
        return 1, 0
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    if not isinstance(inner, list):
        return 0, 0
    below = [counted(one) for one in inner]
    commas = max(len(value) - 1, 0)
    return 1 + sum(one for one, _ in below), commas + sum(one for _, one in below)


@settings(max_examples=num_examples(100, 3000), deadline=None)
@given(value=values, size=st.integers(2, 9))
def test_values_are_counted_across_pieces(value, size):
    found = list(split_strings(json.dumps(value).encode(), size))
    values = sum(strings + text.count(b"[") + text.count(b"{") for strings, text in found)
    assert (values, sum(text.count(b",") for _, text in found)) == counted(value)


def raw_deflate(data):
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", raw_deflate)],
)
def test_compressed_bodies(encoding, pack):
    data = b'{"a": 1}' * 50
    assert decompress(pack(data), encoding, len(data)) == data
    with pytest.raises(web.HTTPRequestEntityTooLarge):
        decompress(pack(data), encoding, len(data) - 1)
    for broken in (pack(data)[:-9], b"\x78not packed"):
        with pytest.raises(ApiError) as told:
            decompress(broken, encoding, 10**6)
        assert told.value.status == 400


async def test_encodings(server):
    body = json.dumps(CHAT).encode()
    for encoding, data, status in (
        ("gzip", gzip.compress(body), 200),
        ("deflate", zlib.compress(body), 200),
        ("identity", body, 200),
        ("gzip", body, 400),
        ("br", body, 415),
    ):
        answer = await server.post(CHAT_PATH, data, headers={"Content-Encoding": encoding})
        assert answer.status == status, encoding
