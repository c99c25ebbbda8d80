"""Token ids in, token ids out: POST /inference/v1/generate, and the requests that are rendered."""

import pytest

from gllm.config.sampling import StructuredOutput
from tests.frontend.conftest import CHAT_PATH, TEXT_PATH
from tests.support.http.endpoint_bodies import EXAMPLES

PATH = "/inference/v1/generate"
BODY = {"token_ids": [72, 105], "sampling_params": {}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


async def test_tokens_of_a_prompt(server):
    params = {"max_tokens": 4, "logprobs": 2, "prompt_logprobs": 1, "n": 2, "detokenize": True}
    answer = await server.post(PATH, {**BODY, "sampling_params": params, "request_id": "mine"})
    ids = server.engine.tokenizer.encode(server.engine.reply)[:4]
    (call,) = server.engine.calls
    assert (call.prompt, call.params.max_tokens, call.request_id) == ([72, 105], 4, "mine")
    assert answer.json["request_id"] == "mine"
    for choice in answer.json["choices"]:
        assert (choice["token_ids"], choice["finish_reason"]) == (ids, "length")
        assert [len(one["top_logprobs"]) for one in choice["logprobs"]["content"]] == [2] * 4
    assert len(answer.json["prompt_logprobs"]) == 2
    assert answer.json["usage"]["completion_tokens"] == 8


async def test_tokens_of_a_prompt_streamed(server):
    whole = (await server.post(PATH, BODY)).json["choices"][0]
    options = {"stream_options": {"include_usage": True}}
    events = await server.stream(PATH, **BODY, **options)
    choices = [choice for event in events for choice in event["choices"]]
    assert [i for choice in choices for i in choice["token_ids"]] == whole["token_ids"]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert events[-1]["usage"]["completion_tokens"] == len(whole["token_ids"])


async def test_without_a_maximum_the_output_may_fill_the_context(server):
    await server.post(PATH, BODY)
    assert server.engine.calls[0].params.max_tokens is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"token_ids": [5] * 256}, "token_ids"),
        ({"sampling_params": {"temperature": 3}}, "sampling_params"),
        ({"sampling_params": {"n": 1000}}, "sampling_params"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params"),
        ({"sampling_params": {"logprobs": 21}}, "sampling_params"),
        ({"sampling_params": {"structured_outputs": {"regex": ""}}}, "sampling_params"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, "sampling_params"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"features": {"mm_hashes": {"image": ["a"]}}}, "features"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ],
)
async def test_what_cannot_be(server, fields, param):
    answer = await server.post(PATH, {**BODY, **fields})
    assert answer.status == 400
    assert answer.error["param"] == param
    assert all(call.closed for call in server.engine.calls)


@pytest.mark.parametrize(
    ("fields", "structured"),
    [
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ("a", "b")}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"grammar": "start: /a/"}}, {"grammar": "start: /a/"}),
        (
            {"response_format": {"type": "json_schema",
                                 "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
            {"json": SCHEMA, "strict": True},
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
async def test_constraints_survive_rendering(server, path, fields, structured):
    answer = await server.post(f"{path}/render", {**EXAMPLES[path], **fields})
    rendered = answer.json if path == CHAT_PATH else answer.json[0]
    assert (await server.post(PATH, rendered)).status == 200
    given = server.engine.calls[0].params.structured
    assert given == StructuredOutput(**structured, param=given.param)


async def test_every_parameter_survives_rendering(server):
    fields = {
        "temperature": 0.3, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "min_tokens": 1,
        "ignore_eos": True, "repetition_penalty": 1.1, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "logit_bias": {"5": 1.5}, "stop": ["x", "yz"],
        "stop_token_ids": [9], "allowed_token_ids": [5, 9], "bad_words": ["no"], "max_tokens": 6,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "logprobs": 3,
        "prompt_logprobs": 2, "n": 2, "priority": 4, "cache_salt": "s",
    }  # fmt: skip
    await server.complete(**fields)
    (rendered,) = (await server.post(f"{TEXT_PATH}/render", {"prompt": "Hi", **fields})).json
    assert (await server.post(PATH, rendered)).status == 200
    direct, generated = server.engine.calls
    assert generated.params == direct.params
    assert (generated.prompt, generated.priority, generated.cache_salt) == (direct.prompt, 4, "s")


async def test_a_request_per_prompt_is_rendered(server):
    body = {"prompt": ["Hi", "Hello"], "max_tokens": 3, "request_id": "r"}
    rendered = (await server.post(f"{TEXT_PATH}/render", body)).json
    encode = server.engine.tokenizer.encode
    assert [one["token_ids"] for one in rendered] == [encode("Hi"), encode("Hello")]
    assert [one["request_id"] for one in rendered] == ["cmpl-r", "cmpl-r-1"]


async def test_rendering_needs_no_engine_and_refuses_what_generation_would(server):
    server.engine.state = "dead"
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    answer = await server.post(f"{CHAT_PATH}/render", chat)
    tokens = await server.post("/tokenize", chat)
    assert answer.json["token_ids"] == tokens.json["tokens"]
    assert answer.json["sampling_params"]["max_tokens"] == 256 - tokens.json["count"]
    wrong = await server.post(f"{CHAT_PATH}/render", {**chat, "temperature": 9})
    assert (wrong.status, wrong.error["param"]) == (400, "temperature")
