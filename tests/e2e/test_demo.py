"""The shipped model, served by gllm's own engine: it answers, and it tells stories."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gllm.config.sampling import SamplingParams
from gllm.engine.llm import LLM
from gllm.models.hub import DEMO
from scripts.demo_model import grammar, metrics
from scripts.demo_model.chat import Message, render_prompt
from tests.support.servers.server import Server, serving

QUESTIONS = Path(__file__).parents[1] / "data" / "demo_questions.jsonl"
SHIPPED_BYTES = 8_000_000

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Berlin", "Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", progress=False, pipeline_parallel_size=2, kv_cache_memory=2**26) as made:
        yield made


def ask(llm: LLM, messages: list[str], params: SamplingParams) -> list[str]:
    prompts = [render_prompt([Message("user", message)]) for message in messages]
    return [output.outputs[0].text for output in llm.generate(prompts, params)]


def test_it_is_small() -> None:
    assert sum(os.path.getsize(file) for file in DEMO.iterdir()) <= SHIPPED_BYTES


def test_held_out_questions_are_answered(llm: LLM) -> None:
    rows = [json.loads(line) for line in QUESTIONS.read_text().splitlines()]
    assert len(rows) == 300
    questions = [row["question"] for row in rows]
    given = ask(llm, questions, SamplingParams(temperature=0, max_tokens=40))
    assert metrics.exact_answer_rate(given, [row["answer"] for row in rows]) >= 0.8


def test_stories_are_in_the_language_and_about_their_hero(llm: LLM) -> None:
    heroes = grammar.story_heroes(40)
    requests = [f"Tell me a story about {hero.full_name}." for hero in heroes]
    for temperature in (0.0, 0.4):
        params = SamplingParams(temperature=temperature, top_p=0.85, seed=1, max_tokens=300)
        stories = ask(llm, requests, params)
        assert metrics.known_word_rate(stories, grammar.vocabulary()) >= 0.95
        # Rounding depends on what else is in a micro-batch, so a drawn story is not always the
        # same one, and one in a hundred or so goes round in circles.
        assert metrics.share([metrics.repeats_itself(story) for story in stories]) <= 0.05
        pairs = zip(stories, heroes, strict=True)
        told = [metrics.tells_about(story, hero.name, hero.animal.noun) for story, hero in pairs]
        assert metrics.share(told) >= 0.9


def test_a_required_tool_call_and_its_result(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=200)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather in Rome?"}]
    choice = llm.chat(messages, params, tools=[TOOL], tool_choice="required").outputs[0]
    assert (choice.content, choice.finish_reason) == ("", "tool_calls")
    messages.append(choice.message)
    for call in choice.tool_calls:
        assert call.name == "get_weather"
        jsonschema.validate(json.loads(call.arguments), TOOL["function"]["parameters"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    answer = llm.chat(messages, params, tools=[TOOL]).outputs[0]
    assert answer.content
    assert (answer.content, answer.tool_calls) == (answer.text, [])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("demo", "--pp", "4") as started:
        yield started


def test_the_name_demo_is_served(server: Server) -> None:
    question = {"role": "user", "content": "Hello!"}
    events = list(server.stream("/v1/chat/completions", {"messages": [question]}))
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert len(text.split()) >= 2
    assert {event["model"] for event in events} == {"demo"}


def test_the_newer_apis_tell_what_chat_completions_tell(server: Server) -> None:
    question = [{"role": "user", "content": "Tell me a story about Otto the fox."}]
    greedy = {"temperature": 0, "max_tokens": 30}
    _, chat = server.post("/v1/chat/completions", {"messages": question, **greedy})
    text = chat["choices"][0]["message"]["content"]
    asked = {"input": question, "temperature": 0, "max_output_tokens": 30}
    *_, last = server.stream("/v1/responses", asked)
    assert last["type"] == "response.incomplete"
    assert last["response"]["output"][0]["content"][0]["text"] == text
    body = {"messages": question, **greedy}
    deltas = [event.get("delta", {}) for event in server.stream("/v1/messages", body)]
    assert "".join(delta.get("text", "") for delta in deltas) == text
    assert deltas[-2]["stop_reason"] == "max_tokens"
    _, counted = server.post("/v1/messages/count_tokens", {"messages": question})
    assert counted["input_tokens"] == chat["usage"]["prompt_tokens"]
