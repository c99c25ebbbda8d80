"""Log-probabilities, echo and what else shows of single tokens, in both endpoints' shapes."""

from typing import Any

import pytest

from gllm.frontend.logprobs import token_text
from gllm.text.tokenizer import Tokenizer
from tests.frontend.conftest import CHAT_PATH, TEXT_PATH
from tests.support.http.fake_engine import scored
from tests.support.text import tokenizers as some


def entry_of(tokenizer, token: int, logprob: float) -> dict:
    raw = tokenizer.token_bytes(token)
    return {"token": token_text(tokenizer, token), "logprob": logprob, "bytes": list(raw)}


def chat_content(tokenizer, tokens: list[int], top: int) -> list[dict]:
    """`logprobs.content` for what the fake engine says."""
    content = []
    for token in tokens:
        (told,) = scored(token, top)
        pairs = zip(told.top_ids, told.top_logprobs, strict=True)
        likeliest = [entry_of(tokenizer, *pair) for pair in pairs]
        content.append({**entry_of(tokenizer, token, -token / 8), "top_logprobs": likeliest})
    return content


@pytest.fixture
def reply(server) -> list[int]:
    return server.engine.tokenizer.encode(server.engine.reply)


@pytest.mark.parametrize("top", [0, 2, 20])
async def test_chat(server, reply, top):
    choice = (await server.chat(logprobs=True, top_logprobs=top)).json["choices"][0]
    content = chat_content(server.engine.tokenizer, reply, top)
    assert choice["logprobs"] == {"content": content}
    text = bytes(byte for entry in content for byte in entry["bytes"]).decode()
    assert text == choice["message"]["content"] == server.engine.reply
    assert server.engine.calls[0].params.logprobs == top


async def test_chat_without_top_logprobs(server):
    choice = (await server.chat(logprobs=True, max_tokens=1)).json["choices"][0]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[]]
    await server.chat(logprobs=False, top_logprobs=0)
    assert server.engine.calls[1].params.logprobs is None


@pytest.mark.parametrize("token_ids", [True, False])
async def test_chat_stream_tells_each_token_with_its_ids(server, reply, token_ids):
    fields = {"logprobs": True, "top_logprobs": 1, "n": 2, "return_token_ids": token_ids}
    events = await server.stream(CHAT_PATH, **fields)
    told: dict[int, list[Any]] = {0: [], 1: []}
    for choice in (event["choices"][0] for event in events):
        content = (choice["logprobs"] or {"content": []})["content"]
        told[choice["index"]] += content
        if "token_ids" in choice:
            assert len(choice["token_ids"]) == len(content)
    wanted = chat_content(server.engine.tokenizer, reply, 1)
    assert told == {0: wanted, 1: wanted}


async def test_what_is_told_ends_at_the_stop_string(server):
    tokenizer = server.engine.tokenizer
    answer = await server.chat(logprobs=True, stop="how are", return_token_ids=True)
    choice = answer.json["choices"][0]
    content = choice["logprobs"]["content"]
    assert content == chat_content(tokenizer, choice["token_ids"], 0)
    assert answer.json["usage"]["completion_tokens"] == len(content)
    assert tokenizer.decode(choice["token_ids"]).endswith("how are")
    shown = await server.chat(stop="how are", include_stop_str_in_output=True)
    assert shown.json["choices"][0]["message"]["content"].endswith(", how are")


async def test_completion(server, reply):
    choice = (await server.complete(logprobs=2, max_tokens=64)).json["choices"][0]
    tokenizer = server.engine.tokenizer
    told = choice["logprobs"]
    assert told["tokens"] == [token_text(tokenizer, token) for token in reply]
    assert told["token_logprobs"] == [-token / 8 for token in reply]
    for token, likeliest in zip(reply, told["top_logprobs"], strict=True):
        (entry,) = scored(token, 2)
        ids, logprobs = [*entry.top_ids, token], [*entry.top_logprobs, entry.logprob]
        texts = [token_text(tokenizer, i) for i in ids]
        assert likeliest == dict(zip(texts, logprobs, strict=True))
    for token, begin in zip(reply, told["text_offset"], strict=True):
        raw = tokenizer.token_bytes(token)
        if all(byte < 128 for byte in raw):
            assert choice["text"][begin:].startswith(raw.decode())
    assert told["text_offset"] == sorted(told["text_offset"])


async def test_halves_of_characters_are_told_apart(server):
    tokenizer = server.engine.tokenizer
    halves = [i for i in range(tokenizer.vocab_size) if not is_text(tokenizer.token_bytes(i))]
    texts = {token_text(tokenizer, i) for i in halves}
    assert len(texts) == len(halves) > 100
    assert all(text.startswith("bytes:\\x") for text in texts)


def is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


PARTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


async def test_a_completion_stream_joins_to_the_whole(server):
    for fields in ({}, {"echo": True}):
        asked = {"prompt": ["Hi you", "é"], "logprobs": 1, "n": 2, "max_tokens": 9, **fields}
        wholes = (await server.complete(**asked, return_token_ids=True)).json["choices"]
        events = await server.stream(TEXT_PATH, **asked, return_token_ids=True)
        for whole in wholes:
            own = [e["choices"][0] for e in events if e["choices"][0]["index"] == whole["index"]]
            assert "".join(choice["text"] for choice in own) == whole["text"]
            assert [i for choice in own for i in choice["token_ids"]] == whole["token_ids"]
            for part in PARTS:
                pieces = [value for choice in own for value in choice["logprobs"][part]]
                assert pieces == whole["logprobs"][part]
            told = [choice for choice in own if choice["token_ids"]]
            assert all(len(c["logprobs"]["tokens"]) == len(c["token_ids"]) for c in told)


async def test_echo(server, reply):
    tokenizer = server.engine.tokenizer
    answer = await server.complete(
        prompt=[[9, 300, 12], [40, 41]],
        echo=True,
        logprobs=1,
        max_tokens=2,
        return_token_ids=True,
    )
    for choice, prompt in zip(answer.json["choices"], ([9, 300, 12], [40, 41]), strict=True):
        assert choice["text"] == tokenizer.decode(prompt) + tokenizer.decode(reply[:2])
        assert choice["token_ids"] == reply[:2]
        told = choice["logprobs"]
        ids = prompt + reply[:2]
        assert told["tokens"] == [token_text(tokenizer, token) for token in ids]
        assert told["token_logprobs"] == [None, *(-token / 8 for token in ids[1:])]
        assert told["top_logprobs"][0] is None
        assert all(len(likeliest) == 2 for likeliest in told["top_logprobs"][1:])
        assert told["text_offset"][len(prompt)] == len(tokenizer.decode(prompt))
    params = server.engine.calls[0].params
    assert (params.logprobs, params.prompt_logprobs) == (1, 1)
    assert answer.json["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("echo", [True, False])
async def test_text_and_offsets_continue_the_prompt(server, echo):
    """As the tokens do, with a tokenizer that writes the space before a word into its token."""
    server.engine.tokenizer, server.engine.reply = Tokenizer(some.sentencepiece()), "o x"
    fields = {"prompt": "Hello", "logprobs": 0, "max_tokens": 9, "echo": echo}
    choice = (await server.complete(**fields)).json["choices"][0]
    assert choice["text"] == ("Hello o x" if echo else " o x")
    told = choice["logprobs"]
    for token, begin in list(zip(told["tokens"], told["text_offset"], strict=True))[-4:]:
        assert choice["text"][begin:].startswith(token)


async def test_echo_without_logprobs_asks_nothing_of_the_prompt(server):
    choice = (await server.complete(prompt="Say: <|im_end|>x", echo=True)).json["choices"][0]
    assert choice["text"].startswith("Say: <|im_end|>xHello")
    assert choice["logprobs"] is None
    assert server.engine.calls[0].params.prompt_logprobs is None
    first, *rest = await server.stream(TEXT_PATH, prompt="Say", echo=True)
    assert first["choices"][0]["text"] == "Say"
    assert "Say" not in "".join(event["choices"][0]["text"] for event in rest)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_echo_alone(server, stream):
    fields = {"prompt": [[9, 8, 7]] * 2, "echo": True, "logprobs": 1, "max_tokens": 0, "n": 2}
    if stream:
        usage = {"stream_options": {"include_usage": True}}
        *events, last = await server.stream(TEXT_PATH, **fields, **usage)
        choices = [event["choices"][0] for event in events]
    else:
        last = (await server.complete(**fields)).json
        choices = last["choices"]
    text = server.engine.tokenizer.decode([9, 8, 7])
    for index in range(4):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == text
        lines = [p for choice in own for p in choice["logprobs"]["token_logprobs"]]
        assert lines == [None, -1.0, -0.875]
        assert own[-1]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 0
    assert last["usage"]["prompt_tokens"] == 6


async def test_prompt_logprobs(server):
    tokenizer = server.engine.tokenizer
    answer = (await server.complete(prompt=[9, 8], prompt_logprobs=1, n=2, max_tokens=1)).json
    place = {
        "8": {"logprob": -1.0, "rank": 50, "decoded_token": token_text(tokenizer, 8)},
        "14": {"logprob": 0.0, "rank": 1, "decoded_token": token_text(tokenizer, 14)},
    }
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [[None, place]] * 2
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    both = {"prompt": [9, 8], "logprobs": 3, "echo": True, "prompt_logprobs": 1}
    answer = (await server.complete(**both)).json
    assert server.engine.calls[-1].params.prompt_logprobs == 3
    assert answer["choices"][0]["prompt_logprobs"] == [None, place]
    chat = (await server.chat(prompt_logprobs=0)).json
    prompt = server.engine.calls[-1].prompt
    told = chat["prompt_logprobs"]
    assert [list(place) for place in told[1:]] == [[str(token)] for token in prompt[1:]]
    assert "prompt_logprobs" not in chat["choices"][0]
    assert "prompt_logprobs" not in (await server.chat()).json


async def test_truncated_prompts(server):
    answer = await server.complete(prompt=[5, 6, 7, 8], truncate_prompt_tokens=2, echo=True)
    assert server.engine.calls[0].prompt == [7, 8]
    assert answer.json["usage"]["prompt_tokens"] == 2
    tokenizer = server.engine.tokenizer
    assert answer.json["choices"][0]["text"].startswith(tokenizer.decode([7, 8]) + "Hello")
    await server.complete(prompt=[9] * 1000, truncate_prompt_tokens=-1, max_tokens=56)
    assert server.engine.calls[1].prompt == [9] * 200
    await server.chat(truncate_prompt_tokens=3)
    assert len(server.engine.calls[2].prompt) == 3
    await server.complete(prompt=[5, 6], truncate_prompt_tokens=7)
    assert server.engine.calls[3].prompt == [5, 6]


async def test_special_tokens_are_shown_where_asked(server):
    server.engine.reply = "Hello<|im_start|> you"
    for skips, text in ((True, "Hello you"), (False, "Hello<|im_start|> you")):
        answer = await server.chat(skip_special_tokens=skips)
        assert answer.json["choices"][0]["message"]["content"] == text


async def test_every_sampling_field_reaches_the_engine(server):
    given = {
        "repetition_penalty": 1.5,
        "presence_penalty": -2,
        "frequency_penalty": 2.0,
        "logit_bias": {"7": -100, "8": 5.5},
        "allowed_token_ids": [7, 8, 8],
        "bad_words": ["x", " y"],
        "truncate_prompt_tokens": 4,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    for ask in (server.chat, server.complete):
        assert (await ask(**given)).status == 200
        params = server.engine.calls[-1].params
        expected = {**given, "logit_bias": {7: -100, 8: 5.5}, "allowed_token_ids": (7, 8, 8)}
        expected["bad_words"] = ("x", " y")
        assert {name: getattr(params, name) for name in expected} == expected
