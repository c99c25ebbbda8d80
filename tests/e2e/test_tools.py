"""Calls of tools that a random model has to make, over real processes: every one is good."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.support.servers.server import Server, serving
from tests.support.text.tokenizers import CHATML, byte_level, save

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Köln", "Rom"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "hours": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
pytestmark = pytest.mark.full
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
TEMPLATE = "{% if tools %}{{ tools | length }} tools{% endif %}" + CHATML


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("with-tools") / "model"
    shutil.copytree(tiny_model, folder)
    save(folder, byte_level(), chat_template=TEMPLATE)
    with serving(folder, "--tool-call-parser", "glm45") as started:
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    url = server.url + "/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def test_a_named_function(server: Server, client: openai.OpenAI) -> None:
    asked: Any = {"model": client.models.list().data[0].id, "messages": MESSAGES, "tools": TOOLS}
    for seed in range(3):
        more: Any = {"tool_choice": NAMED, "seed": seed, "max_tokens": 300}
        choice = client.chat.completions.create(**asked, **more).choices[0]
        calls: Any = choice.message.tool_calls
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        assert [call.function.name for call in calls] == ["weather"]
        jsonschema.validate(json.loads(calls[0].function.arguments), SCHEMA)
        with client.chat.completions.stream(**asked, **more) as stream:
            last = stream.get_final_completion().choices[0]
        streamed: Any = last.message.tool_calls
        assert streamed[0].function.arguments == calls[0].function.arguments
        assert last.finish_reason == "tool_calls"


def test_some_function(server: Server) -> None:
    names = set()
    for seed in range(4):
        body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "seed": seed}
        status, answer = server.post("/v1/chat/completions", {**body, "max_tokens": 200})
        assert status == 200, answer
        calls = [call["function"] for call in answer["choices"][0]["message"]["tool_calls"]]
        for call in calls:
            names.add(call["name"])
            arguments = json.loads(call["arguments"])
            jsonschema.validate(arguments, SCHEMA if call["name"] == "weather" else {})
    assert names <= {"weather", "now"}
