"""Endpoints and fields of other servers: honoured, or refused by name with the reason."""

import pytest

from gllm.config.sampling import StructuredOutput
from gllm.frontend.routes.registry import ENDPOINTS
from tests.frontend.conftest import CHAT_PATH, TEXT_PATH, serving
from tests.support.http.endpoint_bodies import EXAMPLES

MISSING = [(method, one) for one in ENDPOINTS if one.unsupported_reason for method in one.methods]
GBNF = 'root ::= "yes" | "no"'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GENERATING = [CHAT_PATH, TEXT_PATH, "/v1/responses", "/v1/messages"]


async def test_an_endpoint_that_is_not_there_says_why(server):
    for method, endpoint in MISSING:
        async with server.client.request(method, endpoint.path, json={"x": 1}) as response:
            assert response.status == 501, endpoint.path
            error = {} if method == "HEAD" else (await response.json())["error"]
        if method != "HEAD":
            assert endpoint.unsupported_reason in error["message"]
            assert (error["type"], error["code"]) == ("not_implemented_error", "not_implemented")


def test_the_known_ones_are_there():
    paths = {endpoint.path for _, endpoint in MISSING}
    assert paths >= {"/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}
    assert paths >= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}


async def test_they_ask_for_keys(engine):
    async with serving(engine, api_key=("key",)) as server:
        assert (await server.post("/sleep", {})).status == 401


@pytest.mark.parametrize(
    ("name", "asks", "asks_nothing"),
    [
        ("modalities", ["text", "audio"], ["text"]),
        ("audio", {"voice": "alloy", "format": "wav"}, None),
        ("prediction", {"type": "content", "content": "x"}, None),
        ("web_search_options", {}, None),
        ("documents", [{"title": "a", "text": "b"}], []),
        ("grammar_lazy", True, False),
        ("grammar_triggers", [{"type": 1, "value": "x"}], []),
    ],
)
async def test_fields_are_refused_by_name(server, name, asks, asks_nothing):
    for path in GENERATING:
        answer = await server.post(path, {**EXAMPLES[path], name: asks})
        assert (answer.status, answer.error["param"]) == (400, name), path
        assert name in answer.error["message"]
        answer = await server.post(path, {**EXAMPLES[path], name: asks_nothing})
        assert answer.status == 200, path


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
@pytest.mark.parametrize(
    ("name", "value", "equivalent"),
    [
        ("regex", "a+", "structured_outputs.regex"),
        ("ebnf", 'root ::= "a"', "structured_outputs.grammar"),
        ("n_predict", 7, "max_tokens"),
    ],
)
async def test_names_of_other_servers_are_refused_with_ours(server, path, name, value, equivalent):
    answer = await server.post(path, {**EXAMPLES[path], name: value})
    assert (answer.status, answer.error["param"]) == (400, name)
    assert equivalent in answer.error["message"]
    assert (await server.post(path, {**EXAMPLES[path], name: None})).status == 200


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
async def test_the_grammar_fields_of_llama_cpp(server, path):
    example = EXAMPLES[path]
    assert (await server.post(path, {**example, "grammar": GBNF})).status == 200
    assert (await server.post(path, {**example, "json_schema": SCHEMA})).status == 200
    assert (await server.post(path, {**example, "grammar": ""})).status == 200
    told = [call.params.structured for call in server.engine.calls]
    assert told == [
        StructuredOutput(grammar=GBNF, param="grammar"),
        StructuredOutput(json=SCHEMA, param="json_schema"),
        None,
    ]
    for first, second in (
        ({"grammar": GBNF}, {"json_schema": SCHEMA}),
        ({"response_format": {"type": "json_object"}}, {"grammar": GBNF}),
        ({"structured_outputs": {"regex": "a"}}, {"json_schema": SCHEMA}),
    ):
        answer = await server.post(path, {**example, **first, **second})
        assert (answer.status, answer.error["param"]) == (400, next(iter(second)))
        assert next(iter(first)) in answer.error["message"]
    odd = await server.post(path, {**example, "grammar": "x" * 2**17})
    assert (odd.status, odd.error["param"]) == (400, "grammar")


def named(token):
    return token.removeprefix("token_id:").isdigit() and token.startswith("token_id:")


async def test_tokens_as_token_ids_in_a_chat(server):
    asked = {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
    plain = (await server.chat(logprobs=True, top_logprobs=2)).json["choices"][0]["logprobs"]
    choice = (await server.chat(**asked, return_token_ids=True)).json["choices"][0]
    content = choice["logprobs"]["content"]
    assert [f"token_id:{i}" for i in choice["token_ids"]] == [one["token"] for one in content]
    assert all(named(top["token"]) for one in content for top in one["top_logprobs"])
    assert [one["bytes"] for one in content] == [one["bytes"] for one in plain["content"]]
    events = await server.stream(CHAT_PATH, **asked)
    streamed = [c["logprobs"] for event in events for c in event["choices"] if c.get("logprobs")]
    assert [one["token"] for part in streamed for one in part["content"]] == [
        one["token"] for one in content
    ]


@pytest.mark.parametrize("echo", [False, True])
async def test_tokens_as_token_ids_in_a_completion(server, echo):
    asked = {"logprobs": 2, "echo": echo, "return_tokens_as_token_ids": True, "max_tokens": 4}
    choice = (await server.complete(**asked, return_token_ids=True)).json["choices"][0]
    told = choice["logprobs"]
    ids = [f"token_id:{i}" for i in choice["token_ids"]]
    assert told["tokens"][-4:] == ids
    assert len(told["tokens"]) == (6 if echo else 4)
    assert all(map(named, told["tokens"]))
    assert all(named(token) for top in told["top_logprobs"] if top for token in top)
    plain = await server.complete(logprobs=2, echo=echo, max_tokens=4)
    assert told["text_offset"] == plain.json["choices"][0]["logprobs"]["text_offset"]
