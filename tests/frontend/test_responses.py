"""POST /v1/responses: what is asked reaches the engine, what comes back is in the API's shape."""

import asyncio
import json
from typing import Any

import pytest

from gllm.engine.interface import EngineUnavailableError
from gllm.frontend.fields.parsing import parse_fields
from gllm.frontend.fields.responses import ResponsesFields, convert_responses_to_chat
from gllm.options.field_types import FieldError
from tests.frontend.conftest import CHAT_PATH
from tests.frontend.test_stream import until
from tests.support.http.sse import named_events_of

PATH = "/v1/responses"


async def respond(server, **fields):
    return await server.post(PATH, {"input": "Hi", **fields})


async def stream(server, **fields):
    body = {"input": "Hi", "stream": True, **fields}
    async with server.client.post(PATH, json=body) as response:
        assert response.status == 200, await response.text()
        return named_events_of(await response.read())


def prompt_of(server):
    return server.engine.tokenizer.decode(server.engine.calls[-1].prompt, skip_special_tokens=False)


def messages_of(**fields):
    return convert_responses_to_chat(parse_fields(fields, ResponsesFields))["messages"]


async def test_whole(server):
    answer = await respond(server, request_id="one", metadata={"a": "b"}, temperature=0.5)
    body = answer.json
    assert (answer.status, body["object"], body["status"]) == (200, "response", "completed")
    assert (body["id"], body["model"], body["metadata"]) == ("resp_one", "fake/model", {"a": "b"})
    assert (body["temperature"], body["store"], body["error"]) == (0.5, True, None)
    text = {"type": "output_text", "text": server.engine.reply, "annotations": [], "logprobs": []}
    item = {"id": "msg_one_0", "type": "message", "role": "assistant", "status": "completed"}
    assert body["output"] == [{**item, "content": [text]}]
    prompt = len(server.engine.calls[0].prompt)
    output = len(server.engine.tokenizer.encode(server.engine.reply))
    assert body["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + output,
    }


async def test_events_in_their_order(server):
    events = await stream(server)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["response"]["status"] for event in events[:2]] == ["in_progress"] * 2
    added, part, *deltas, text, part_done, item_done, completed = events[2:]
    assert (added["item"]["status"], added["item"]["content"]) == ("in_progress", [])
    assert part["part"]["text"] == ""
    assert "".join(event["delta"] for event in deltas) == server.engine.reply == text["text"]
    assert {event["item_id"] for event in (part, *deltas, text)} == {added["item"]["id"]}
    assert part_done["part"] == item_done["item"]["content"][0]
    assert completed["response"]["output"] == [item_done["item"]]
    assert completed["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 3


async def test_a_streams_last_event_is_the_whole_answer(server):
    asked = {"request_id": "one", "max_output_tokens": 7, "instructions": "Be brief."}
    last = (await stream(server, **asked))[-1]["response"]
    whole = (await respond(server, **asked)).json
    times = {"created_at": 0, "completed_at": 0}
    assert {**last, **times} == {**whole, **times}


async def test_max_output_tokens_leave_it_incomplete(server):
    body = (await respond(server, max_output_tokens=2)).json
    assert server.engine.calls[0].params.max_tokens == 2
    assert (body["status"], body["completed_at"]) == ("incomplete", None)
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"
    *_, item, last = await stream(server, max_output_tokens=2)
    assert item["item"]["status"] == "incomplete"
    assert last["type"] == "response.incomplete"


async def test_stop_strings(server):
    body = (await respond(server, stop=["how are"])).json
    assert body["output"][0]["content"][0]["text"] == "Hello wörld 🎉, "
    assert body["status"] == "completed"


async def test_nothing_said_is_an_empty_text(server):
    for body in (
        (await respond(server, stop="Hello")).json,
        (await stream(server, stop="Hello"))[-1]["response"],
    ):
        assert [part["text"] for part in body["output"][0]["content"]] == [""]


async def test_logprobs(server):
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    told = (await respond(server, **asked)).json["output"][0]["content"][0]["logprobs"]
    assert len(told) == len(server.engine.tokenizer.encode(server.engine.reply))
    assert all(len(entry["top_logprobs"]) == 2 for entry in told)
    events = await stream(server, **asked)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == told
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == told
    cut = {**asked, "stop": "how are"}
    body = (await respond(server, **cut)).json
    told = body["output"][0]["content"][0]["logprobs"]
    assert len(told) == body["usage"]["output_tokens"]
    deltas = [event["logprobs"] for event in await stream(server, **cut) if "delta" in event]
    assert [entry for entries in deltas for entry in entries] == told
    bare = await respond(server, include=["message.output_text.logprobs"])
    assert bare.json["output"][0]["content"][0]["logprobs"][0]["top_logprobs"] == []


async def test_instructions_come_first(server):
    await respond(
        server,
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "Speak Latin."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"role": "user", "content": "c"},
        ],
    )
    assert prompt_of(server) == (
        "<|im_start|>system\nBe brief.\n\nSpeak Latin.<|im_end|>\n"
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )


def test_calls_of_custom_tools_have_their_input_as_an_argument():
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "shell", "input": 'ls "a"'}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "b"}
    asked, said, told = messages_of(input=[{"role": "user", "content": "Look."}, call, result])
    assert asked == {"role": "user", "content": "Look."}
    (made,) = said["tool_calls"]
    assert (made["id"], made["function"]["name"]) == ("c1", "shell")
    assert json.loads(made["function"]["arguments"]) == {"input": 'ls "a"'}
    assert told == {"role": "tool", "tool_call_id": "c1", "content": "b"}


def test_items_of_one_turn_are_one_message():
    call = {"type": "function_call", "name": "add", "arguments": '{"a": 1}'}
    thought: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": None}
    items = [
        {"role": "user", "content": "1 + 1?"},
        {**thought, "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "Let me see."},
        {**call, "call_id": "c1"},
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "3"}],
        },
        {**thought},
        {"role": "assistant", "content": "2."},
    ]

    def made(call_id):
        function = {"name": "add", "arguments": '{"a": 1}'}
        return {"id": call_id, "type": "function", "function": function}

    assert messages_of(input=items) == [
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [made("c1"), made("c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "3"},
        {"role": "assistant", "content": "2."},
    ]


def test_what_is_nested_elsewhere():
    schema = {"name": "x", "schema": {"type": "object"}, "strict": True}
    function = {"name": "f", "description": "does", "parameters": {"type": "object"}}
    fields = {
        "input": "x",
        "text": {"format": {"type": "json_schema", **schema}, "verbosity": "low"},
        "tools": [{"type": "function", **function, "strict": None}],
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "truncation": "auto",
    }
    chat = convert_responses_to_chat(parse_fields(fields, ResponsesFields))
    assert chat["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert (chat["reasoning_effort"], chat["truncate_prompt_tokens"]) == ("low", -1)


SAME = [
    ("reasoning", "reasoning_effort", {"effort": "odd"}, "odd"),
    ("tool_choice", "tool_choice", "required", "required"),
    (
        "tools",
        "tools",
        [{"type": "function", "name": "f"}],
        [{"type": "function", "function": {"name": "f"}}],
    ),
    (
        "text",
        "response_format",
        {"format": {"type": "json_schema", "name": "x", "schema": 7}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": 7}},
    ),
]


@pytest.mark.parametrize(("name", "chat_name", "value", "chat_value"), SAME)
async def test_what_chat_completions_refuse_is_refused_here(
    server, name, chat_name, value, chat_value
):
    chat = await server.chat(**{chat_name: chat_value})
    answer = await respond(server, **{name: value})
    assert (chat.status, chat.error["param"]) == (400, chat_name)
    assert (answer.status, answer.error["param"]) == (400, name)


@pytest.mark.parametrize("stream", [True, False])
async def test_what_the_engine_refuses_is_named_as_the_client_knows_it(server, stream):
    server.engine.raises = FieldError("response_format", "response_format cannot be used")
    text = {"format": {"type": "json_schema", "name": "x", "schema": {}}}
    answer = await respond(server, text=text, stream=stream)
    assert (answer.status, answer.error["param"]) == (400, "text")


PART = {"type": "input_image", "image_url": "data:"}
BAD: dict[str, list[Any]] = {
    "input": [
        None,
        [],
        7,
        ["x"],
        [[]],
        [{}],
        [{"role": "user"}],
        [{"role": "odd", "content": "x"}],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": [PART]}],
        [{"role": "user", "content": [7]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"type": "item_reference", "id": "x"}],
        [{"type": 7}],
        [{"type": "message"}],
        [{"type": "function_call", "call_id": "a", "name": "b"}],
        [{"type": "function_call", "call_id": "a", "name": "b", "arguments": {}}],
        [{"type": "function_call_output", "output": "a"}],
        [{"type": "function_call_output", "call_id": "a", "output": [{"text": 7}]}],
        [{"type": "reasoning", "content": "x"}],
        [{"type": "reasoning", "content": [{"type": "summary_text", "text": "x"}]}],
        [{"type": "reasoning", "summary": []}],
        "long " * 400,
        [{"role": "user", "content": "long " * 400}],
    ],
    "instructions": [7, ["x"]],
    "max_output_tokens": [0, -1, 1.5, "7", 2**31],
    "temperature": [-1, 2.1, "1"],
    "top_logprobs": [-1, 21, "1"],
    "include": ["x", [7]],
    "tools": [["x"], [{"type": "namespace"}], [{"type": "function"}], [{}], {}],
    "tool_choice": [7, {"type": "allowed_tools"}, {"type": "function"}, {}, "odd"],
    "text": ["x", {"format": "text"}, {"format": {"type": "odd"}}, {"format": {}}],
    "reasoning": ["low", {"effort": 7}, {"effort": "odd"}],
    "truncation": ["odd", 7],
    "metadata": [[], {"a": 1}, "x"],
    "stop": [7, [""], ["x"] * 33],
    "background": [True],
    "previous_response_id": ["resp_1"],
    "conversation": ["conv_1", {"id": "conv_1"}],
    "prompt": [{"id": "p"}],
    "prompt_cache_options": [{"prewarm": True}, 7],
    "stream": ["x"],
}


async def test_bad_values_are_refused_by_name(server):
    for name, value in [(name, value) for name, values in BAD.items() for value in values]:
        answer = await respond(server, **{name: value})
        assert (answer.status, answer.error["param"]) == (400, name), (value, answer.json)
        assert set(answer.error) == {"message", "type", "param", "code"}
        assert server.engine.calls == [], (name, value)


async def test_too_long_an_input_says_so(server):
    answer = await respond(server, input="long " * 400)
    assert answer.error["code"] == "context_length_exceeded"
    assert (await respond(server, input="long " * 400, truncation="auto")).status == 200
    both = await respond(server, truncation="disabled", truncate_prompt_tokens=7)
    assert (both.status, both.error["param"]) == (400, "truncation")


NEUTRAL = {
    "store": True,
    "user": "me",
    "service_tier": "flex",
    "prompt_cache_key": "x",
    "prompt_cache_options": {"mode": "explicit"},
    "stream_options": {"include_obfuscation": False},
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "tools": [],
    "tool_choice": "auto",
    "background": False,
    "top_logprobs": 0,
    "truncation": "disabled",
    "previous_response_id": None,
}


async def test_values_that_ask_nothing(server, caplog):
    for name, value in NEUTRAL.items():
        assert (await respond(server, **{name: value})).status == 200, name
        assert not caplog.records, name


async def test_unknown_fields_are_warned_of_once(server, caplog):
    assert (await respond(server, wild=1, odd=2)).status == 200
    assert len(caplog.records) == 1


async def test_fields_of_all_endpoints_reach_the_engine(server):
    given = {"seed": 7, "top_k": 3, "min_p": 0.1, "logit_bias": {"7": 1.0}, "bad_words": ["x"]}
    assert (await respond(server, **given, cache_salt="me", priority=2)).status == 200
    call = server.engine.calls[0]
    assert (call.params.seed, call.params.top_k, call.params.min_p) == (7, 3, 0.1)
    assert (call.params.logit_bias, call.params.bad_words) == ({7: 1.0}, ("x",))
    assert (call.cache_salt, call.priority) == ("me", 2)


async def test_failure_in_mid_stream(server):
    server.engine.fail_after = 3
    *events, last = await stream(server)
    assert last["type"] == "response.failed"
    assert last["sequence_number"] == len(events)
    response = last["response"]
    assert (response["status"], response["output"][0]["status"]) == ("failed", "incomplete")
    assert response["error"]["message"] == "logits are not finite"
    assert response["error"]["code"] == "generation_failed"


async def test_failures_tell_no_secrets_and_have_their_status(server):
    server.engine.raises_after = 2
    assert "secret" not in str((await stream(server))[-1])
    server.engine.raises = EngineUnavailableError("dead", "gone", 7)
    answer = await respond(server, stream=True)
    assert (answer.status, answer.error["code"]) == (503, "engine_dead")
    assert (await respond(server, model="other")).status == 404


async def test_disconnect_aborts(server):
    server.engine.delay = 0.05
    server.engine.reply = "word " * 200
    response = await server.client.post(PATH, json={"input": "Hi", "stream": True})
    await response.content.readany()
    response.close()
    await until(lambda: server.engine.calls[0].closed)
    assert not server.engine.calls[0].finished


async def test_abort_by_id_leaves_it_incomplete(server):
    server.engine.delay, server.engine.reply = 0.02, "word " * 200
    asking = asyncio.create_task(stream(server, request_id="mine"))
    await until(lambda: server.engine.calls)
    assert (await server.post("/abort", {"request_id": "mine"})).json == {"aborted": 1}
    last = (await asking)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "abort"}


async def test_it_is_what_chat_completions_do(server):
    await server.post(CHAT_PATH, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9})
    await respond(server, max_output_tokens=9)
    first, second = server.engine.calls
    assert (first.prompt, first.params) == (second.prompt, second.params)
