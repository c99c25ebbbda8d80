"""Coding agents: recorded requests of Codex and Claude Code, and what they send back to us.

tests/data/agent_requests.json has some requests of a scripted task of ten turns, their texts
shortened. tests/e2e/test_coding_agents.py runs the agents themselves.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gllm.frontend.fields.messages import MessagesFields, convert_messages_to_chat
from gllm.frontend.fields.parsing import parse_fields
from gllm.frontend.fields.responses import (
    ResponsesFields,
    convert_responses_to_chat,
    flat_name,
)
from gllm.frontend.middleware.observe import MAX_WARNING_CHARACTERS, warning_header
from gllm.options.field_types import FieldError
from tests.frontend.conftest import CHAT_PATH, Server, serving
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.scripted_server import scripted_engine
from tests.support.http.sse import named_events_of

REQUESTS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "agent_requests.json").read_text(encoding="utf-8")
)
RESPONSES_PATH, MESSAGES_PATH = "/v1/responses", "/v1/messages"


@pytest.fixture
def engine() -> FakeEngine:
    engine = scripted_engine()
    engine.max_model_len = 10**6
    return engine


@pytest.fixture
async def server(engine: FakeEngine) -> AsyncIterator[Server]:
    async with serving(engine) as made:
        yield made


def prompt_of(server: Server) -> str:
    return server.engine.tokenizer.decode(server.engine.calls[-1].prompt, False)


def write_call(name: str, arguments: str) -> str:
    """Return a call as the demo model's family writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("number", range(len(REQUESTS)))
async def test_recorded_requests_are_answered(server, number):
    path, body = REQUESTS[number]["path"], REQUESTS[number]["body"]
    async with server.client.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        assert named_events_of(await response.read())
        warning = response.headers.get("Warning", "")
    kinds = {tool.get("type") for tool in body.get("tools", ())}
    hosted = sorted(kinds - {None, "function", "custom", "namespace"})
    assert bool(hosted) == bool(warning)
    for kind in hosted:
        assert f"of type {kind} is left out" in warning


async def test_results_that_are_no_text_are_said_to_be_none(server):
    shown = 0
    for request in REQUESTS:
        body = {**request["body"], "stream": False}
        await server.post(request["path"], body)
        text = json.dumps(body)
        for kind, placeholder in (
            ('"type": "input_image"', "[image: not shown: this model reads text only]"),
            ('"type": "image"', "[image: not shown: this model reads text only]"),
            ('"type": "tool_reference"', "[tool: CronList]"),
        ):
            assert (kind in text) == (placeholder in prompt_of(server)) or kind not in text
            shown += kind in text
    assert shown == 3


async def test_a_tool_of_a_namespace_is_called_by_both_names(server):
    (body, *_) = (r["body"] for r in REQUESTS if r["path"] == RESPONSES_PATH)
    server.engine.reply = write_call("multi_agent_v1__close_agent", '{"target": "a"}')
    answer = await server.post(RESPONSES_PATH, {**body, "stream": False})
    (call,) = answer.json["output"]
    assert (call["namespace"], call["name"]) == ("multi_agent_v1", "close_agent")
    again = [*body["input"], call]
    again.append({"type": "function_call_output", "call_id": call["call_id"], "output": "gone"})
    await server.post(RESPONSES_PATH, {**body, "input": again, "stream": False})
    assert '"name": "multi_agent_v1__close_agent"' in prompt_of(server)
    assert "gone" in prompt_of(server)


def test_names_of_namespaces_fit():
    assert flat_name("mcp__files__", "read") == "mcp__files__read"
    assert flat_name(None, "read") == flat_name("", "read") == "read"
    long = {flat_name("n" * 60, f"tool_{number}") for number in range(100)}
    assert len(long) == 100
    assert {len(name) for name in long} == {64}


def responses(**fields: Any) -> tuple[dict[str, Any], list[str]]:
    warnings: list[str] = []
    parsed = parse_fields({"input": "Hi", **fields}, ResponsesFields)
    return convert_responses_to_chat(parsed, warnings.append), warnings


def messages(**fields: Any) -> tuple[dict[str, Any], list[str]]:
    warnings: list[str] = []
    base = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    parsed = parse_fields({**base, **fields}, MessagesFields)
    return convert_messages_to_chat(parsed, warnings.append), warnings


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def test_a_choice_of_hosted_tools():
    tools = [FUNCTION, {"type": "web_search_preview"}, {"type": "mcp", "server_label": "x"}]
    chat, warnings = responses(tools=tools)
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["f"]
    assert len(warnings) == 2
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [tools[0], tools[1]]}
    assert (
        len(responses(tools=tools, tool_choice=allowed)[0]["tool_choice"]["allowed_tools"]["tools"])
        == 1
    )
    allowed["tools"] = [tools[1]]
    assert responses(tools=tools, tool_choice=allowed)[0]["tool_choice"] == "none"
    with pytest.raises(FieldError, match="web_search_preview"):
        responses(tools=tools, tool_choice={"type": "web_search_preview"})


def test_items_of_hosted_tools_are_left_out():
    items = [
        {"role": "user", "content": "a"},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {}},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "b"},
    ]
    chat, warnings = responses(input=items)
    assert [m["content"] for m in chat["messages"]] == ["a", "no", "b"]
    assert warnings == [
        "input[1] of type web_search_call is left out: this server does not have it"
    ]
    content = [
        {"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "x", "content": []},
        {"type": "text", "text": "found"},
    ]
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content},
        {"role": "user", "content": "b"},
    ]
    chat, warnings = messages(messages=turns)
    assert [m["content"] for m in chat["messages"]] == ["a", "found", "b"]
    assert len(warnings) == 2


def test_a_header_has_the_first_warnings_shortened():
    tools = [{"type": "t" * 1000}] * 100
    _, warnings = responses(tools=tools)
    assert len(warnings) == 100
    assert max(map(len, warnings)) < 200
    header = warning_header(warnings)
    assert len(header) <= MAX_WARNING_CHARACTERS + 20
    assert header.startswith('299 gllm "tools[0] of type ttt')


IMAGE_PARTS = {
    CHAT_PATH: {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    RESPONSES_PATH: {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
    MESSAGES_PATH: {"type": "image", "source": {"type": "base64", "data": "AA=="}},
}


@pytest.mark.parametrize("path", IMAGE_PARTS)
async def test_an_image_is_refused_while_it_is_new(server, path):
    text = {"type": "input_text" if path == RESPONSES_PATH else "text", "text": "See:"}
    turns = [{"role": "user", "content": [text, IMAGE_PARTS[path]]}]
    field = "input" if path == RESPONSES_PATH else "messages"
    rest = {"max_tokens": 4} if path == MESSAGES_PATH else {}
    answer = await server.post(path, {field: turns, **rest})
    assert (answer.status, answer.error["param"]) == (400, field)
    assert "(LlamaForCausalLM is served, of which only" in answer.error["message"]
    # A client that keeps the refused message can go on.
    for added in (
        [{"role": "user", "content": "Hi"}],
        [{"role": "assistant", "content": "no"}, {"role": "user", "content": "Hi"}],
    ):
        answer = await server.post(path, {field: [*turns, *added], **rest})
        assert answer.status == 200, answer.json
        assert "[image: not shown: this model reads text only]" in prompt_of(server)


def test_documents_as_text_are_shown():
    content = [
        {"type": "document", "source": {"type": "text", "data": "of a file"}},
        {"type": "document", "title": "b.pdf", "source": {"type": "base64", "data": "AA=="}},
        {"type": "search_result", "title": "T", "source": "u", "content": [{"text": "x"}]},
        {"type": "new_kind"},
    ]
    result = {"type": "tool_result", "tool_use_id": "x", "content": content}
    call = {"type": "tool_use", "id": "x", "name": "f", "input": {}}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    shown = messages(messages=turns)[0]["messages"][-1]["content"]
    no_text = "not shown: this model reads text only"
    assert shown == f"of a file\n[document b.pdf: {no_text}]\nT\nu\nx\n[new_kind: {no_text}]"
