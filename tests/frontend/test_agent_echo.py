"""All four APIs accept what the server has sent back to it; no JSON body is answered with 500.

Agents send the whole conversation with every request: a part that is refused once ends it for ever.
"""

import json
import random
from collections.abc import AsyncIterator, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from gllm.config.output_parsers import TOOL_CALL_PARSERS
from gllm.frontend.context import CONTEXT
from gllm.text.surrogates import replace_escaped_surrogates, replace_surrogates_in
from gllm.text.tokenizer import Tokenizer
from tests.frontend.conftest import CHAT_PATH, TEXT_PATH, Server, serving
from tests.frontend.test_agents import (
    MESSAGES_PATH,
    REQUESTS,
    RESPONSES_PATH,
    messages,
    responses,
)
from tests.support.examples import further_runs, num_examples
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.scripted_server import DEMO
from tests.support.http.sse import events_of, named_events_of

PATHS = (CHAT_PATH, TEXT_PATH, RESPONSES_PATH, MESSAGES_PATH)
USER = {"role": "user", "content": "Go on"}
SCHEMA = {"type": "object", "properties": {"a": {}, "b": {"type": "integer"}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOLS: dict[str, list[Any]] = {
    CHAT_PATH: [
        {"type": "function", "function": FUNCTION},
        {"type": "custom", "custom": {"name": "c"}},
    ],
    RESPONSES_PATH: [{"type": "function", **FUNCTION}, {"type": "custom", "name": "c"}],
    MESSAGES_PATH: [{"name": "f", "input_schema": SCHEMA}],
}
PIECES = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "</function>"),
    *("<parameter=a>", "</parameter>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>"),
    *('{"name": "f", "arguments": ', '{"name": "c", "arguments": {"input": "', '"a": ', '"b": '),
    *("[TOOL_CALLS]", "f\n", "{", "}", "[", "]", '"', ",", ":", "\n", " ", "\\", "x", "é🎉"),
    *(r"\ud800", r"\udc00", r"\ud83d\ude00", r"\u0000", r"\"", "1", "-", "NaN", "null", "1e999"),
    *("9" * 80, "<|im_end|>", "<|im_start|>", "\x00"),
)
CALL = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
ONCE_REFUSED = (
    CALL % '{"a": 1,}',
    CALL % r'{"a": "\ud800"}',
    CALL % ('{"a": ' + "9" * 80 + "}"),
    CALL % '{"a": NaN}',
    "<tool_call>\n<function=f>\n<parameter=a>\n" + r'["\ud800"]' + "\n</parameter>\n</function>",
    "\n",
)


def outputs(seed: int, number: int) -> Iterator[tuple[str, str]]:
    """Yield names of tool call parsers and outputs: some that were refused, then random ones."""
    families = [name for name in TOOL_CALL_PARSERS if name != "auto"]
    chance = random.Random(seed)
    for text in ONCE_REFUSED:
        yield "qwen3_coder" if "<function" in text else "hermes", text
    for _ in range(number):
        text = "".join(chance.choices(PIECES, k=chance.randrange(1, 14)))
        yield chance.choice(families), CALL % text if chance.random() < 0.3 else text


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    engine = FakeEngine(Tokenizer.load(DEMO), max_model_len=10**6)
    async with serving(engine, checks_schemas=False, reasoning_parser="think") as made:
        yield made


async def read(server: Server, path: str, body: dict[str, Any]) -> Any:
    """Post a body; return the answer: its JSON, or its events."""
    async with server.client.post(path, json=body) as response:
        data = await response.read()
        assert response.status == 200, (path, body, data)
    if not body.get("stream"):
        return json.loads(data)
    return events_of(data) if path in (CHAT_PATH, TEXT_PATH) else named_events_of(data)


def chat_turns(answer: Any) -> list[Any]:
    """Return the assistant's message of an answer or its events, and results of its calls."""
    if isinstance(answer, list):
        message: dict[str, Any] = {"role": "assistant", "content": None}
        calls: dict[int, Any] = {}
        for event in answer:
            for choice in event["choices"]:
                delta = choice["delta"]
                for name in ("content", "reasoning_content"):
                    if delta.get(name):
                        message[name] = (message.get(name) or "") + delta[name]
                for part in delta.get("tool_calls") or ():
                    call = calls.setdefault(part["index"], part)
                    for kind, field in (("function", "arguments"), ("custom", "input")):
                        if call is not part and kind in part:
                            call[kind][field] += part[kind][field]
        message |= {"tool_calls": list(calls.values())} if calls else {}
    else:
        message = answer["choices"][0]["message"]
    calls_made = message.get("tool_calls") or ()
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "ok"} for c in calls_made]
    return [message, *results, USER]


def response_turns(answer: Any) -> list[Any]:
    """Return the output items of an answer or its events, and results of its calls."""
    response = answer[-1]["response"] if isinstance(answer, list) else answer
    assert response["status"] in ("completed", "incomplete"), answer
    results = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"}
        for item in response["output"]
        if item["type"] in ("function_call", "custom_tool_call")
    ]
    return [*response["output"], *results, USER]


def message_turns(answer: Any) -> list[Any]:
    """Return the assistant's message of an answer or its events, and results of its calls."""
    if isinstance(answer, list):
        content: list[Any] = []
        for event in answer:
            if event["type"] == "content_block_start":
                content.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                (text,) = (v for k, v in event["delta"].items() if k != "type")
                name = {"tool_use": "json"}.get(content[-1]["type"], content[-1]["type"])
                content[-1][name] += text
        for block in content:
            text = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = read_object(text)
    else:
        content = answer["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}
        for block in content
        if block["type"] == "tool_use"
    ]
    text = {"type": "text", "text": "Go on"}
    return [
        {"role": "assistant", "content": content},
        {"role": "user", "content": [*results, text]},
    ]


def read_object(text: str) -> Any:
    """Return a call's input as clients read it."""
    try:
        value = json.loads(text)
        json.dumps(value)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


@further_runs(8)
async def test_what_was_sent_is_accepted_back(server, run):
    context = server.client.server.app[CONTEXT]
    for family, text in outputs(run, num_examples(10, 400)):
        context.config = replace(context.config, tool_call_parser=family)
        server.engine.reply = text
        for path in PATHS:
            for stream in (False, True):
                body: dict[str, Any] = {"max_tokens": 9000, "stream": stream}
                if path == TEXT_PATH:
                    answer = await read(server, path, {**body, "prompt": "Hi"})
                    events = answer if stream else [answer]
                    said = "".join(e["choices"][0]["text"] for e in events if e["choices"])
                    await read(server, path, {**body, "prompt": f"Hi{said}"})
                    continue
                field = "messages"
                turns = {CHAT_PATH: chat_turns, MESSAGES_PATH: message_turns}.get(path)
                if path == RESPONSES_PATH:
                    field, turns = "input", response_turns
                    body["max_output_tokens"] = body.pop("max_tokens")
                body["tools"] = TOOLS[path] if family != "none" else []
                answer = await read(server, path, {**body, field: [USER]})
                assert turns is not None
                await read(server, path, {**body, field: [USER, *turns(answer)]})


@pytest.mark.full
async def test_arguments_deeper_than_python_reads(server):
    server.engine.reply = CALL % ('{"a": ' + "[" * 1100 + "]" * 1100 + "}")
    body = {"tools": TOOLS[MESSAGES_PATH], "max_tokens": 9000, "messages": [USER]}
    turns = message_turns(await read(server, MESSAGES_PATH, body))
    await read(server, MESSAGES_PATH, {**body, "messages": [USER, *turns]})


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 1e308, 10**30, 10**400, -(10**4000)),
    *("", "x", "\ud800", "x\udfff", "\x00", "<|im_end|>", "a" * 3000, "9" * 5000, "[" * 3000),
    *("{", "[1]", r'{"a": "\ud800"}', '{"a": ' + "9" * 5000 + "}", '{"a": NaN}', '{"a": {}}'),
    *([], {}, [None], [[]], [{}], {"x": 1}, {"type": "x"}, {"type": ["x"]}, {"": None}),
    *({"\ud800": 1}, ["\udc00"], {"type": {}}, "gllm-summary:AAAA", "gllm-summary:/w=="),
    *("user", "system", "assistant", "tool", "developer", "text", "image", "input_image"),
    *("tool_use", "tool_result", "function_call", "custom_tool_call", "function", "custom"),
    *("namespace", "reasoning", "compaction", "item_reference", "thinking", "web_search"),
    {"type": "json_schema", "schema": {"type": "object"}},
    {"type": "grammar", "syntax": "regex", "definition": "["},
)
NAMES = (
    *("type", "role", "name", "content", "input", "text", "arguments", "tools", "id", "strict"),
    *("format", "namespace", "metadata", "stop", "reasoning", "tool_choice", "max_tokens"),
    *("previous_response_id", "store", "system", "thinking", "tool_use_id", "call_id", "output"),
)
VARIANTS = {
    MESSAGES_PATH: (MESSAGES_PATH, MESSAGES_PATH, "/v1/messages/count_tokens"),
    RESPONSES_PATH: (RESPONSES_PATH, "/v1/responses/input_tokens", "/v1/responses/compact"),
    CHAT_PATH: (CHAT_PATH, CHAT_PATH, f"{CHAT_PATH}/render"),
    TEXT_PATH: (TEXT_PATH, TEXT_PATH, f"{TEXT_PATH}/render"),
}


def sent_bodies() -> list[tuple[str, dict[str, Any]]]:
    """Return path and body of the recorded requests, and of the same for the two other APIs."""
    sent = [(request["path"], request["body"]) for request in REQUESTS]
    for path, body in list(sent):
        convert = messages if path == MESSAGES_PATH else responses
        chat = {name: value for name, value in convert(**body)[0].items() if value is not None}
        sent.append((CHAT_PATH, chat))
    text = {
        "prompt": "Hi",
        "stop": ["x"],
        "logit_bias": {"7": 1},
        "structured_outputs": {"regex": "a"},
    }
    return [*sent, (TEXT_PATH, {**text, "max_tokens": 5, "n": 2, "logprobs": 2})]


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values in a JSON value, but not that of itself."""
    members: Any = ()
    if isinstance(value, dict):
        members = value.items()
    elif isinstance(value, list):
        members = enumerate(value)
    for key, member in members:
        yield (*path, key)
        yield from paths_of(member, (*path, key))


def value_at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def mutate(body: Any, chance: random.Random) -> Any:
    """Return a copy of a body with one to three values changed, removed, added or moved."""
    body = deepcopy(body)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        *outer, key = chance.choice(list(paths_of(body)))
        parent = value_at(body, tuple(outer))
        match chance.randrange(6):
            case 0 | 1 | 2:
                parent[key] = deepcopy(chance.choice(VALUES))
            case 3 if len(body) > 1:
                del parent[key]
            case 4:
                source = value_at(body, chance.choice(list(paths_of(body))))
                parent[key] = deepcopy(source)
            case _ if isinstance(parent, list):
                parent.insert(key, deepcopy(parent[key]))
            case _:
                parent[chance.choice(NAMES)] = deepcopy(chance.choice(VALUES))
    return body


async def post_mutants(server: Server, seed: int, number: int) -> dict[int, int]:
    """Post mutants of the recorded requests; return how often each status was answered."""
    chance = random.Random(seed)
    statuses: dict[int, int] = {}
    server.engine.reply = "x"
    bodies = sent_bodies()
    for _ in range(number):
        path, body = chance.choice(bodies)
        body = mutate({**body, "stream": chance.random() < 0.5}, chance)
        data = json.dumps(body).encode()
        path = chance.choice(VARIANTS[path])
        async with server.client.post(path, data=data) as response:
            text = await response.text()
        assert response.status < 500, (path, data, text)
        if response.status != 200:
            assert json.loads(text)["error"]["message"], data
        statuses[response.status] = statuses.get(response.status, 0) + 1
    return statuses


async def test_no_mutant_of_a_request_breaks_the_server(server):
    statuses = await post_mutants(server, 0, 300)
    assert min(statuses[200], statuses[400]) > 60


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 11))
async def test_no_mutant_of_many_breaks_the_server(server, seed):
    await post_mutants(server, seed, 10_000)


@pytest.mark.parametrize("path", PATHS)
async def test_lone_surrogates_become_characters(server, path):
    field = {TEXT_PATH: "prompt", RESPONSES_PATH: "input"}.get(path, "messages")
    text = r'"\ud83d \ud83d\ude00 \\ud800 \udc00"'
    value = text if field in ("prompt", "input") else f'[{{"role": "user", "content": {text}}}]'
    rest = ', "max_tokens": 5' if path == MESSAGES_PATH else ""
    answer = await server.post(path, f'{{"{field}": {value}{rest}}}'.encode())
    assert answer.status == 200, answer.json
    prompt = server.engine.tokenizer.decode(server.engine.calls[-1].prompt, False)
    assert "\ufffd 😀 \\ud800 \ufffd" in prompt


async def test_integers_of_thousands_of_digits(server):
    for request in REQUESTS[:3]:
        body = json.dumps({**request["body"], "seed": 7})[:-1]
        for field in ("seed", "max_tokens", "tools", "unknown"):
            data = f'{body}, "{field}": {"9" * 5000}}}'.encode()
            assert (await server.post(request["path"], data)).status == 400


def test_only_lone_surrogates_are_replaced():
    chance = random.Random(0)
    units = ("\\", "u", r"\ud83d", r"\ude00", r"\uDC00", "d83d", "x", r"\n", r"\\", '\\"', "é")
    num_valid = 0
    for _ in range(3000):
        body = f'"{"".join(chance.choices(units, k=chance.randrange(8)))}"'.encode()
        repaired = replace_escaped_surrogates(body)
        try:
            value = json.loads(body)
        except ValueError:
            continue
        assert json.loads(repaired) == replace_surrogates_in(value), body
        num_valid += 1
    assert num_valid > 1000
    assert replace_escaped_surrogates(rb'{"a": "\u12') == rb'{"a": "\u12'
