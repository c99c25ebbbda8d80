"""Whatever a client sends, it is told what is wrong with it, in one shape."""

import asyncio
import json
import math
from typing import Any

import pytest

from gllm.engine.interface import EngineUnavailableError
from tests.frontend.conftest import CHAT, CHAT_PATH, TEXT, TEXT_PATH

BIG = 2**63
HUGE = 10**30
NUMBERS = [math.nan, math.inf, -math.inf, 10**400, "1", True, [1], {}]
BAD_SCHEMAS = [
    [],
    "x",
    7,
    {"contains": 3},
    {"properties": {"a": {"if": {}}}},
    {"properties": 7},
    {"anyOf": {}},
    {"$ref": "http://x/y"},
    {"enum": ["x" * 200_000]},
    {"const": math.nan},
]
"""The first three are no objects."""
BAD_VALUES: dict[str, list[Any]] = {
    "model": [7, ["m"], {}, True, math.nan],
    "temperature": [*NUMBERS, -0.1, 2.1, HUGE],
    "top_p": [*NUMBERS, 0, -1, 1.1, HUGE],
    "top_k": [*NUMBERS, -2, 1.5, 2**31, BIG, HUGE],
    "min_p": [*NUMBERS, -0.1, 1.1, BIG],
    "seed": [*NUMBERS, 0.5, BIG, -BIG - 1, HUGE],
    "stop": [7, {}, [7], [""], [None], ["x"] * 33],
    "stop_token_ids": [7, "7", ["7"], [-1], [BIG], [2**31], [100_000], [1.5], [None]],
    "min_tokens": [*NUMBERS, -1, 1.5, 2**31, BIG],
    "max_tokens": [*NUMBERS, 0, -1, 1.5, 2**31, BIG],
    "max_completion_tokens": [*NUMBERS, 0, -1, 1.5, 2**31, BIG],
    "ignore_eos": [0, 1, "true", []],
    "n": [*NUMBERS, 0, -1, 9, 1.5, 2**31, BIG, HUGE],
    "stream": [0, 1, "true", {}],
    "stream_options": [7, [], "x", {"include_usage": 1}, {"include_usage": True}],
    "return_token_ids": [0, "x", []],
    "priority": [*NUMBERS, 2**31, -(2**31) - 1, 0.5],
    "cache_salt": [7, "x" * 129, ["x"]],
    "request_id": [7, "", "a b", "x" * 129, "a\n", "é"],
    "slo_ttft": [*NUMBERS, 0, -1, -0.0],
    "slo_tpot": [*NUMBERS, 0, -1, -0.0],
    "prompt_cache_key": [7, "x" * 1025, ["x"]],
    "presence_penalty": [*NUMBERS, -2.1, 2.1, HUGE],
    "frequency_penalty": [*NUMBERS, -2.1, 2.1, HUGE],
    "repetition_penalty": [*NUMBERS, 0, -0.0, -1, -HUGE],
    "logit_bias": [
        [],
        7,
        "x",
        [1],
        {"x": 1},
        {"1.5": 1},
        {"": 1},
        {"1": "1"},
        {"1": None},
        {"1": True},
        {"1": 100.5},
        {"1": -101},
        {"1": math.nan},
        {"1": math.inf},
        {"1": 10**400},
        {"-1": 1},
        {"100000": 1},
        {str(2**31): 1},
        {str(HUGE): 1},
        {"\ud800": 1},
    ],
    "logprobs": ["x", "1", [1], {}, math.nan, math.inf, 10**400, HUGE, 0.5],
    "prompt_logprobs": [*NUMBERS, -1, 21, 0.5, 2**31, BIG, HUGE],
    "best_of": [2, 0, "x", True, math.nan, HUGE],
    "use_beam_search": [True, 1, "x"],
    "length_penalty": [0.5, 0, True, "1", math.nan],
    "early_stopping": [True, "never", 1],
    "response_format": [
        {},
        "text",
        {"type": "text", "x": 1},
        {"type": "json"},
        {"type": "json_schema"},
        *(
            {"type": "json_schema", "json_schema": value}
            for value in (None, {}, "x", {"name": "x"})
        ),
        *({"type": "json_schema", "json_schema": {"schema": value}} for value in BAD_SCHEMAS),
        *({"type": other, "json_schema": {"schema": {}}} for other in ("text", "json_object")),
    ],
    "structured_outputs": [
        {},
        "x",
        [],
        {"regex": 7},
        {"regex": ""},
        {"regx": "a"},
        {"regex": "a", "choice": ["b"]},
        {"choice": []},
        {"choice": [7]},
        {"choice": "a"},
        {"grammar": ""},
        {"grammar": {}},
        {"json": "{"},
        {"json": "[]"},
        {"json": 7},
        {"regex": "a" * 10_000},
        *({"json": value} for value in BAD_SCHEMAS[3:]),
    ],
    "guided_json": [{}, "{}"],
    "guided_regex": ["a+"],
    "guided_choice": [["a"]],
    "guided_grammar": ["start: /a/"],
    "tools": [[{"type": "function"}], {}, "x"],
    "tool_choice": ["required", {"type": "function"}, 7],
    "functions": [[{"name": "a b"}], ["f"], "x", 7],
    "function_call": [{"name": "f"}, {}, "required", 7],
    "parallel_tool_calls": [0, "false", []],
    "reasoning_effort": ["odd", 7],
    "truncate_prompt_tokens": [*NUMBERS, 0, -2, 0.5, 2**31, BIG, HUGE],
    "allowed_token_ids": [7, "7", ["7"], [], [-1], [BIG], [2**31], [100_000], [1.5], [None], {}],
    "bad_words": [7, "x", {}, [7], [""], [None], ["x"] * 1025],
    "continue_final_message": [True],
    "skip_special_tokens": [0, 1, "x", []],
    "include_stop_str_in_output": [0, 1, "x", []],
}
DEEP: list[Any] = []
for _ in range(150):
    DEEP = [DEEP]
BAD_CHATS: dict[str, list[Any]] = {
    "messages": [
        None,
        [],
        {},
        "Hi",
        7,
        [7],
        [{"role": "user"}],
        [{"role": 1, "content": "x"}],
        DEEP,
    ],
    "add_generation_prompt": [1, "x"],
    "chat_template_kwargs": [7, [], {"tools": 1}, {"enable_thinking": 1}],
    "logprobs": [0, 1],
    "top_logprobs": [*NUMBERS, 1, -1, 21, 0.5, 2**31, BIG, HUGE],
    "echo": [True, 0, "x"],
    "max_tokens": [0],
}
LONG = "long " * 400
BAD_CHATS["messages"] += [[{"role": "user", "content": text}] for text in (LONG, 7)]
BAD_TEXTS: dict[str, list[Any]] = {
    "logprobs": [True, False, -1, 21, 2**31, BIG],
    "top_logprobs": [1, -1, True, 2**31],
    "echo": [0, 1, "x", []],
    "prompt": [
        None,
        "",
        [],
        [[]],
        {},
        7,
        True,
        math.nan,
        [None],
        [True],
        [1.5],
        [-1],
        [BIG],
        [HUGE],
    ],
}
BAD_TEXTS["prompt"] += [["x", 7], ["x", [7]], [[5], "x"], [5, [5]], [5, "x"], ["ok", ""], LONG]
BAD_TEXTS["prompt"] += [[5] * 256, [100_000], ["x"] * 65, DEEP, [[5], [-5]]]

TABLE = [
    (path, name, value)
    for path, base, more in ((CHAT_PATH, CHAT, BAD_CHATS), (TEXT_PATH, TEXT, BAD_TEXTS))
    for table in (BAD_VALUES, more)
    for name, values in table.items()
    for value in values
]


async def test_every_bad_value_is_refused_by_name(server):
    assert len(TABLE) > 400
    wrong = []
    for path, name, value in TABLE:
        body = {**(CHAT if path == CHAT_PATH else TEXT), name: value}
        answer = await server.post(path, json.dumps(body).encode())
        if answer.status != 400 or answer.error["param"] != name:
            wrong.append((path, name, repr(value)[:60], answer.status, answer.json))
        assert set(answer.error) == {"message", "type", "param", "code"}
        assert len(answer.error["message"]) <= 1000
    assert wrong == []
    assert server.engine.calls == []
    assert (await server.chat()).status == 200


RELATIONS = [
    (CHAT_PATH, "top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    (CHAT_PATH, "top_logprobs", {"logprobs": False, "top_logprobs": 1}),
    (CHAT_PATH, "prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
    (TEXT_PATH, "prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
    (TEXT_PATH, "max_tokens", {"max_tokens": 0, "echo": False}),
    (TEXT_PATH, "max_tokens", {"max_tokens": -1, "echo": True}),
    (TEXT_PATH, "prompt", {"prompt": [5] * 256, "max_tokens": 0, "echo": True}),
    (TEXT_PATH, "n", {"n": 9, "logprobs": 1, "echo": True}),
]


@pytest.mark.parametrize(("path", "param", "fields"), RELATIONS, ids=str)
async def test_fields_that_do_not_go_together(server, path, param, fields):
    answer = await server.post(path, {**(CHAT if path == CHAT_PATH else TEXT), **fields})
    assert (answer.status, answer.error["param"]) == (400, param)
    assert server.engine.calls == []


async def test_beam_search_is_refused_with_the_way_out(server):
    answer = await server.complete(best_of=4)
    assert "beam search" in answer.error["message"]
    assert "use n to sample several choices" in answer.error["message"]


async def test_missing_prompt_is_named(server):
    assert (await server.post(CHAT_PATH, {})).error["param"] == "messages"
    assert (await server.post(TEXT_PATH, {})).error["param"] == "prompt"


BODIES = {
    "empty": b"",
    "blank": b"  ",
    "text": b"hello",
    "cut": b'{"prompt": "x',
    "number": b"7",
    "list": b"[]",
    "null": b"null",
    "latin": b'{"prompt": "\xe9"}',
    "surrogate": b'{"prompt": "\xed\xa0\x80"}',
    "byte order": b"\xff\xfe{}",
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 20_000,
    "two": b"{}{}",
    "digits": b'{"x": ' + b"9" * 5000 + b"}",
    "bad key": b'{"\\ud800": NaN, "prompt": "x"}',
}


async def test_bodies_that_are_no_requests(server):
    for path in (CHAT_PATH, TEXT_PATH):
        for name, body in BODIES.items():
            answer = await server.post(path, body)
            assert answer.status == 400, (path, name)
            assert answer.error["type"] == "invalid_request_error", (path, name)


async def test_nesting_is_named(server):
    deep = b'{"model": "fake/model", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    answer = await server.post(CHAT_PATH, deep)
    assert (answer.status, answer.error["param"]) == (400, "messages")


async def test_broken_compression(server):
    answer = await server.post(CHAT_PATH, b"no gzip", headers={"Content-Encoding": "gzip"})
    assert answer.status == 400


async def test_the_path_of_a_model_is_an_alias_of_its_name(server):
    server.engine.root = "/models/fake/"
    for name in ("fake/model", "/models/fake/", "/models/fake"):
        answer = await server.chat(model=name)
        assert (answer.status, answer.json["model"]) == (200, "fake/model")
    assert (await server.chat(model="/models")).status == 404


async def test_unknown_model(server):
    answer = await server.chat(model="other")
    assert answer.status == 404
    assert answer.error == {
        "message": "The model `other` does not exist.",
        "type": "not_found_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize(
    ("ask", "param"), [("chat", "messages"), ("complete", "prompt")], ids=["chat", "text"]
)
async def test_context_overflow(server, ask, param):
    fields = {"messages": [{"role": "user", "content": LONG}], "prompt": LONG}
    answer = await (server.chat if ask == "chat" else server.complete)(**{param: fields[param]})
    assert answer.status == 400
    assert (answer.error["param"], answer.error["code"]) == (param, "context_length_exceeded")


async def test_longest_prompt_that_fits(server):
    assert (await server.complete(prompt=[5] * 255)).status == 200


async def test_routes_that_are_none(server):
    async with server.client.get("/nowhere") as missing:
        assert (missing.status, (await missing.json())["error"]["code"]) == (404, "http_404")
        assert "X-Request-Id" in missing.headers
    async with server.client.get(CHAT_PATH) as wrong:
        assert (wrong.status, wrong.headers["Allow"]) == (405, "POST")
        assert (await wrong.json())["error"]["type"] == "method_not_allowed"


async def test_large_body(server):
    answer = await server.complete(prompt="x" * 2**18)
    assert (answer.status, answer.error["type"]) == (413, "request_too_large")


@pytest.mark.parametrize("state", ["loading", "draining", "dead"])
@pytest.mark.parametrize("stream", [True, False])
async def test_engine_that_takes_nothing(server, state, stream):
    server.engine.state, server.engine.cause = state, "stage 1 was killed"
    answer = await server.chat(stream=stream)
    assert (answer.status, answer.error["code"]) == (503, f"engine_{state}")
    assert int(answer.headers["Retry-After"]) > 0
    assert ("stage 1 was killed" in answer.error["message"]) == (state == "dead")


async def test_full_queue(server):
    server.engine.delay = 0.02
    # Two requests at a time fill the 64 places together with what they found.
    crowd = [server.complete(prompt=["x"] * 30, max_tokens=8) for _ in range(4)]
    answers = await asyncio.gather(*crowd)
    statuses = sorted(answer.status for answer in answers)
    assert statuses == [200, 200, 503, 503]
    refused = next(answer for answer in answers if answer.status == 503)
    assert refused.error["code"] == "engine_full"
    assert int(refused.headers["Retry-After"]) > 0
    assert (await server.complete()).status == 200


async def test_failed_choice(server):
    server.engine.fail_after = 2
    answer = await server.chat(n=2)
    assert (answer.status, answer.error["message"]) == (500, "logits are not finite")
    server.engine.fail_after = None
    assert (await server.chat()).status == 200


async def test_raising_engine_is_one_requests_trouble(server, caplog):
    server.engine.raises = RuntimeError("a secret")
    answer = await server.chat()
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert "secret" not in answer.error["message"]
    assert "secret" in caplog.text
    server.engine.raises = EngineUnavailableError("full", "later")
    assert (await server.chat()).status == 503


async def test_choices_are_bounded_before_anything_is_made(server):
    assert (await server.complete(prompt=["x"] * 64, n=8, max_tokens=1)).status == 200
    server.engine.calls.clear()
    assert (await server.complete(prompt=["x"] * 65)).error["param"] == "prompt"
    assert (await server.complete(n=9)).error["param"] == "n"
    assert server.engine.calls == []
