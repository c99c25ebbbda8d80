"""Probes of the demo model on a real server: what the grammar enforces reaches the client."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from examples import tool_call
from tests.support.servers.server import Server, serving

pytestmark = pytest.mark.full
"""The tests of structured output in tests/e2e have a server already."""
QUESTION: Any = {"role": "user", "content": "How is the weather in Rome?"}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("demo") as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_guided_call(client: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": [QUESTION], "tools": [tool_call.TOOL]}
    asked["seed"] = 1
    (whole,) = client.chat.completions.create(tool_choice=choice, **asked).choices
    assert whole.finish_reason == "tool_calls"
    for call in whole.message.tool_calls:
        assert call.function.name == "get_weather"
        schema = tool_call.TOOL["function"]["parameters"]
        jsonschema.validate(json.loads(call.function.arguments), schema)
    with client.chat.completions.stream(tool_choice=choice, **asked) as stream:
        (streamed,) = stream.get_final_completion().choices
    assert streamed.message.tool_calls is not None
    assert [call.function.arguments for call in streamed.message.tool_calls] == [
        call.function.arguments for call in whole.message.tool_calls
    ]


def test_tools_that_the_model_may_call(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=[QUESTION], tools=[tool_call.TOOL], temperature=0
    )
    assert answer.choices[0].finish_reason in ("stop", "tool_calls")
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


def test_the_example_of_a_tool_call(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    tool_call.main(f"{server.url}/v1")
    called, result, *answer = capsys.readouterr().out.splitlines()
    assert called.startswith('get_weather({"city": "')
    assert "days of sunshine" in result
    assert any(answer)
