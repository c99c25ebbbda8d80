"""POST /v1/messages and its count of tokens: what is asked reaches the engine, what comes back is
in the API's shape."""

import asyncio
import json
from typing import Any

import pytest

from gllm.engine.interface import EngineUnavailableError
from gllm.frontend.fields.messages import MessagesFields, convert_messages_to_chat
from gllm.frontend.fields.parsing import parse_fields
from tests.frontend.conftest import serving
from tests.frontend.test_stream import until
from tests.support.http.sse import named_events_of

PATH = "/v1/messages"
USER = {"role": "user", "content": "Hi"}
BASE = {"messages": [USER], "max_tokens": 40}


async def ask(server, **fields):
    return await server.post(PATH, {**BASE, **fields})


async def stream(server, **fields):
    body = {**BASE, "stream": True, **fields}
    async with server.client.post(PATH, json=body) as response:
        assert response.status == 200, await response.text()
        return named_events_of(await response.read())


def chat_of(**fields):
    return convert_messages_to_chat(parse_fields({**BASE, **fields}, MessagesFields))


async def test_whole(server):
    answer = await ask(server, request_id="one")
    prompt = len(server.engine.calls[0].prompt)
    assert answer.status == 200
    assert answer.json == {
        "id": "msg_one",
        "type": "message",
        "role": "assistant",
        "model": "fake/model",
        "content": [{"type": "text", "text": server.engine.reply}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt - 3,
            "cache_read_input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "output_tokens": len(server.engine.tokenizer.encode(server.engine.reply)),
        },
    }


async def test_events_in_their_order(server):
    events = await stream(server)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start, _, block, *deltas, stop, ending, _ = events
    message = start["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    assert message["usage"]["cache_read_input_tokens"] == 3
    assert message["usage"]["output_tokens"] >= 1
    assert block["content_block"] == {"type": "text", "text": ""}
    assert {event["delta"]["type"] for event in deltas} == {"text_delta"}
    assert "".join(event["delta"]["text"] for event in deltas) == server.engine.reply
    assert {event["index"] for event in (block, *deltas, stop)} == {0}
    assert ending["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert ending["usage"] == (await ask(server)).json["usage"]


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["zzz", "how are"]}, "stop_sequence", "how are"),
        ({"stop_token_ids": [0]}, "end_turn", None),
    ],
)
async def test_reasons_to_stop(server, fields, reason, sequence):
    ending = {"stop_reason": reason, "stop_sequence": sequence}
    body = (await ask(server, **fields)).json
    assert {name: body[name] for name in ending} == ending
    assert (await stream(server, **fields))[-2]["delta"] == ending


async def test_nothing_said_is_no_content(server):
    assert (await ask(server, stop_sequences=["Hello"])).json["content"] == []
    kinds = [event["type"] for event in await stream(server, stop_sequences=["Hello"])]
    assert kinds == ["message_start", "ping", "message_delta", "message_stop"]


async def test_the_system_comes_first(server):
    await ask(
        server,
        system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "c"}]},
            {"role": "assistant", "content": "d"},
            {"role": "user", "content": [{"type": "text", "text": t} for t in "ef"]},
        ],
    )
    tokenizer = server.engine.tokenizer
    assert tokenizer.decode(server.engine.calls[0].prompt, skip_special_tokens=False) == (
        "<|im_start|>system\na\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\nd<|im_end|>\n<|im_start|>user\ne\nf<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_an_answer_that_has_begun_is_gone_on_with(server):
    assert (
        await ask(server, messages=[USER, {"role": "assistant", "content": "He"}])
    ).status == 200
    tokenizer = server.engine.tokenizer
    text = tokenizer.decode(server.engine.calls[0].prompt, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nHe")


def test_blocks_become_messages():
    use = {"type": "tool_use", "name": "add", "input": {"a": "é"}}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "?"},
                {"type": "text", "text": "Let me see."},
                {**use, "id": "c1"},
                {**use, "id": "c2"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "2"},
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "content": [{"type": "text", "text": "3"}],
                    "is_error": True,
                },
                {"type": "tool_result", "tool_use_id": "c3"},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]

    def made(call_id):
        function = {"name": "add", "arguments": '{"a": "é"}'}
        return {"id": call_id, "type": "function", "function": function}

    assert chat_of(messages=messages)["messages"] == [
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [made("c1"), made("c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "3"},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {"role": "user", "content": "Well?"},
    ]


def test_a_users_messages_in_a_row_are_one():
    turns = [USER, {"role": "user", "content": "there"}, {"role": "system", "content": "x"}, USER]
    assert chat_of(messages=turns)["messages"] == [
        {"role": "user", "content": "Hi\nthere"},
        {"role": "system", "content": "x"},
        USER,
    ]


def test_what_has_other_names_elsewhere():
    schema = {"type": "object"}
    chat = chat_of(
        tools=[{"name": "f", "description": "does", "input_schema": schema}],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
    )
    function = {"name": "f", "description": "does", "parameters": schema}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert chat["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True}
    assert chat["reasoning_effort"] == "low"
    assert chat["response_format"]["json_schema"]["schema"] == schema
    assert chat_of(thinking={"type": "disabled"})["chat_template_kwargs"]["thinking"] is False
    choices = [chat_of(tool_choice={"type": kind})["tool_choice"] for kind in ("any", "none")]
    assert choices == ["required", "none"]


IMAGE = {"type": "image", "source": {}}
BAD: dict[str, list[Any]] = {
    "messages": [
        None,
        [],
        "x",
        7,
        [7],
        [{}],
        [{"role": "user"}],
        [{"role": "odd", "content": "x"}],
        [{"role": "user", "content": [IMAGE]}],
        [{"role": "user", "content": [7]}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "assistant", "content": [{"type": "tool_result"}]}],
        [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}],
        [{"role": "assistant", "content": [{"type": "tool_use", "name": "b", "input": {}}]}],
        [{"role": "user", "content": [{"type": "tool_result"}]}],
        [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": 7}]}],
        [
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"text": 7}]}],
            }
        ],
        [{"role": "assistant", "content": [{"type": "thinking"}]}],
        [{"role": "user", "content": "long " * 400}],
    ],
    "system": [7, [7], [{}], [IMAGE]],
    "max_tokens": [None, 0, -1, 1.5, "7"],
    "temperature": [-1, 2.1, "1"],
    "top_p": [0, 1.1],
    "top_k": [-2, 0.5],
    "stop_sequences": ["x", [7], [""], ["x"] * 33],
    "tools": ["x", [7], [{"type": "custom"}], [{}], [{"name": "f"}]],
    "tool_choice": ["auto", {}, {"type": "odd"}, {"type": "tool"}, {"type": "any"}],
    "thinking": [True, {}, {"type": "odd"}],
    "output_config": [7, {"effort": "odd"}, {"format": {"type": "text"}}],
    "container": ["x"],
    "mcp_servers": [[{}]],
    "output_format": [{}],
    "stream": ["x"],
}


async def test_bad_values_are_refused_by_name(server):
    for name, value in [(name, value) for name, values in BAD.items() for value in values]:
        answer = await ask(server, **{name: value})
        assert (answer.status, answer.error["param"]) == (400, name), (value, answer.json)
        assert answer.json["type"] == "error"
        assert set(answer.error) == {"message", "type", "param", "code"}
        assert server.engine.calls == [], (name, value)


NEUTRAL = {
    "metadata": {"user_id": "me"},
    "service_tier": "auto",
    "speed": "fast",
    "cache_control": {"type": "ephemeral"},
    "context_management": {"edits": []},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "tools": [],
    "tool_choice": {"type": "auto"},
    "system": "",
    "stop_sequences": [],
    "output_config": {},
}


async def test_values_that_ask_nothing(server, caplog):
    for name, value in NEUTRAL.items():
        assert (await ask(server, **{name: value})).status == 200, name
        assert not caplog.records, name


@pytest.mark.parametrize("body", [b"", b"[", b"x" * 2**19])
async def test_every_error_says_that_it_is_one(server, body):
    answer = await server.post(PATH, body)
    assert answer.status in (400, 413)
    assert answer.json["type"] == "error"
    assert answer.error["type"] in ("invalid_request_error", "request_too_large")


async def test_errors_of_the_server(server):
    assert (await ask(server, model="other")).error["type"] == "not_found_error"
    server.engine.raises = EngineUnavailableError("full", "later", 7)
    answer = await ask(server, stream=True)
    assert (answer.status, answer.json["type"]) == (503, "error")
    assert answer.headers["Retry-After"] == "7"
    server.engine.state = "loading"
    for path in (PATH, f"{PATH}/count_tokens"):
        answer = await server.post(path, {"messages": [USER], "max_tokens": 1})
        assert (answer.status, answer.error["code"]) == (503, "engine_loading")


async def test_failures_in_mid_stream(server):
    server.engine.fail_after = 3
    *events, last = await stream(server)
    assert last["type"] == "error"
    assert last["error"]["message"] == "logits are not finite"
    assert events[0]["type"] == "message_start"
    server.engine.fail_after, server.engine.raises_after = None, 2
    assert "secret" not in json.dumps((await stream(server))[-1])


async def test_disconnect_aborts(server):
    server.engine.delay = 0.05
    server.engine.reply = "word " * 200
    body = {**BASE, "max_tokens": 200, "stream": True}
    response = await server.client.post(PATH, json=body)
    await response.content.readany()
    response.close()
    await until(lambda: server.engine.calls[0].closed)
    assert not server.engine.calls[0].finished


async def test_abort_by_id_is_told(server):
    server.engine.delay, server.engine.reply = 0.02, "word " * 200
    asking = asyncio.create_task(ask(server, request_id="mine", max_tokens=200))
    await until(lambda: server.engine.calls)
    assert (await server.post("/abort", {"request_id": "mine"})).json == {"aborted": 1}
    assert (await asking).json["stop_reason"] == "abort"


async def test_tokens_are_counted_as_they_are_read(server):
    asked = {"system": "Be brief.", "messages": [USER, {"role": "assistant", "content": "He"}]}
    counted = await server.post(f"{PATH}/count_tokens", asked)
    assert counted.json == {"input_tokens": len(await _prompt(server, asked))}
    refused = await server.post(f"{PATH}/count_tokens", {"messages": [{"role": "user"}]})
    assert (refused.status, refused.error["param"]) == (400, "messages")
    assert refused.json["type"] == "error"


async def _prompt(server, asked):
    assert (await ask(server, **asked)).status == 200
    return server.engine.calls[-1].prompt


@pytest.mark.parametrize("streamed", [False, True])
async def test_too_long_a_prompt_is_told_in_the_words_of_its_clients(server, streamed):
    messages = [{"role": "user", "content": "x y " * 200}]
    answer = await server.post(PATH, {**BASE, "messages": messages, "stream": streamed})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert answer.error["message"].startswith("prompt is too long: messages has ")
    assert "maximum context length" in answer.error["message"]


async def test_errors_of_every_step_have_their_type(engine):
    async with serving(engine, api_key=("key",), rate_limit=1) as server:
        key = {"x-api-key": "key"}
        statuses = []
        for headers in ({}, {"Host": "other.example", **key}, key, key):
            for path in (PATH, f"{PATH}/count_tokens"):
                answer = await server.post(path, {}, headers=headers)
                statuses.append(answer.status)
                assert answer.json["type"] == "error", answer.json
        answer = await server.post(f"{PATH}/none", {}, headers=key)
        assert (answer.status, answer.json["type"]) == (404, "error")
        assert statuses == [401, 401, 403, 403, 400, 429, 429, 429]
