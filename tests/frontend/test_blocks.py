"""Reasoning and tool calls in the shapes of the newer APIs, whole and streamed."""

import json
from typing import Any

import openai
import pytest

from gllm.frontend.output_blocks import BlockSplitter
from gllm.frontend.sse import ServerSentEvent
from gllm.text.chat.template import ChatTemplate
from gllm.text.output.events import (
    ContentDelta,
    ReasoningDelta,
    ToolCallAborted,
    ToolCallArgumentsDelta,
    ToolCallStart,
)
from gllm.text.tokenizer import Tokenizer
from tests.support.http.sse import named_events_of
from tests.support.text import tokenizers as some

TEMPLATE = (
    '{% if tools %}{{ tools | tojson }} <tool_call>{"name": ..., "arguments": ...}</tool_call>'
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARGUMENTS = '{"city": "Köln", "days": 2}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
REPLY = f"<think>\nHm, Köln.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
MANY = 4096


@pytest.fixture
def capable(server):
    """The server with a model that reasons and calls tools."""
    server.engine.tokenizer = Tokenizer(some.byte_level(), ChatTemplate(TEMPLATE, {}))
    server.engine.reply, server.engine.max_model_len = REPLY, MANY
    return server


async def streamed(server, path, body):
    async with server.client.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        return named_events_of(await response.read())


RESPONSE: dict[str, Any] = {
    "input": "How is the weather in Köln?",
    "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
}
MESSAGE: dict[str, Any] = {
    "messages": [{"role": "user", "content": "How is the weather in Köln?"}],
    "max_tokens": 1000,
    "tools": [{"name": "weather", "input_schema": SCHEMA}],
}


async def test_items_of_a_response(capable):
    body = (await capable.post("/v1/responses", RESPONSE)).json
    thought, text, first, second = body["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, Köln."}]
    assert text["content"][0]["text"] == "Let me see."
    assert first["type"] == second["type"] == "function_call"
    assert (first["name"], first["arguments"]) == ("weather", ARGUMENTS)
    assert first["call_id"] != second["call_id"]
    assert len({item["id"] for item in body["output"]}) == 4
    assert {item["status"] for item in body["output"]} == {"completed"} == {body["status"]}
    assert body["tools"] == RESPONSE["tools"]


async def test_events_of_a_response(capable):
    events = await streamed(capable, "/v1/responses", RESPONSE)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    told = [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]]

    def part(kind):
        inner = ["content_part.added", f"{kind}.delta", f"{kind}.done", "content_part.done"]
        return ["output_item.added", *inner, "output_item.done"]

    arguments = [f"function_call_arguments.{kind}" for kind in ("delta", "done")]
    call = ["output_item.added", *arguments, "output_item.done"]
    middle = part("reasoning_text") + part("output_text") + call + call
    assert told == ["created", "in_progress", *middle, "completed"]
    done = [event["item"] for event in events if event["type"].endswith("output_item.done")]
    assert events[-1]["response"]["output"] == done
    for index, item in enumerate(done):
        of_item = [event for event in events if event.get("output_index") == index]
        ids = {event["item_id"] for event in of_item if "item_id" in event}
        assert ids == {item["id"]}
        text = "".join(event.get("delta", "") for event in of_item)
        assert text == (item["arguments"] if "arguments" in item else item["content"][0]["text"])


async def test_openais_client_sees_calls(capable):
    url = str(capable.client.make_url("/v1"))
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    async with client, client.responses.stream(model="fake/model", **RESPONSE) as stream:
        events: list[Any] = [event async for event in stream]
        final: Any = await stream.get_final_response()
    kind = "response.function_call_arguments.delta"
    assert [event.snapshot for event in events if event.type == kind][-1] == ARGUMENTS
    assert [item.type for item in final.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert final.output[2].arguments == ARGUMENTS
    assert final.output[0].content[0].text == "Hm, Köln."


async def test_blocks_of_a_message(capable):
    body = (await capable.post("/v1/messages", MESSAGE)).json
    thought, text, first, second = body["content"]
    assert thought == {"type": "thinking", "thinking": "Hm, Köln.", "signature": ""}
    assert text == {"type": "text", "text": "Let me see."}
    assert (first["type"], first["name"]) == ("tool_use", "weather")
    assert first["input"] == second["input"] == json.loads(ARGUMENTS)
    assert body["stop_reason"] == "tool_use"


async def test_events_of_a_message(capable):
    events = await streamed(capable, "/v1/messages", MESSAGE)
    blocks: dict[int, Any] = {}
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks[event["index"]] = [event["content_block"], ""]
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                _, piece = event["delta"].values()
                blocks[event["index"]][1] += piece
    kinds = [event["type"] for event in events]
    assert kinds.count("content_block_stop") == len(blocks) == 4
    assert [block["type"] for block, _ in blocks.values()] == [
        "thinking",
        "text",
        "tool_use",
        "tool_use",
    ]
    assert [text for _, text in blocks.values()] == [
        "Hm, Köln.",
        "Let me see.",
        ARGUMENTS,
        ARGUMENTS,
    ]
    assert blocks[2][0]["input"] == {}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_an_answer_can_be_given_back(capable):
    """What a model said reaches it again as it was."""
    output = (await capable.post("/v1/responses", RESPONSE)).json["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "Rain."}
        for item in output
        if item["type"] == "function_call"
    ]
    question = {"role": "user", "content": RESPONSE["input"]}
    again = {**RESPONSE, "input": [question, *output, *results]}
    assert (await capable.post("/v1/responses", again)).status == 200
    content = (await capable.post("/v1/messages", MESSAGE)).json["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "Rain."}
        for block in content
        if block["type"] == "tool_use"
    ]
    turns = [
        *MESSAGE["messages"],
        {"role": "assistant", "content": content},
        {"role": "user", "content": results},
    ]
    assert (await capable.post("/v1/messages", {**MESSAGE, "messages": turns})).status == 200
    calls = capable.engine.calls
    prompts = [
        capable.engine.tokenizer.decode(calls[i].prompt, skip_special_tokens=False) for i in (1, 3)
    ]
    assert prompts[0] == prompts[1]
    assert "<think>Hm, Köln.</think>Let me see.<tool_call>" in prompts[0]
    assert prompts[0].count("<|im_start|>tool\nRain.<|im_end|>") == 2


@pytest.mark.parametrize("cut", range(1, 80, 7))
async def test_a_call_that_is_cut_off_is_none(capable, cut):
    """However far an answer got, a stream and a whole answer agree on what can be called."""
    tokens = len(capable.engine.tokenizer.encode(REPLY))
    body = {**RESPONSE, "max_output_tokens": tokens - cut}
    whole = (await capable.post("/v1/responses", body)).json
    last = (await streamed(capable, "/v1/responses", body))[-1]
    assert whole["status"] == "incomplete"
    assert last["type"] == "response.incomplete"
    outputs = [
        [
            item["arguments"]
            for item in response["output"]
            if item["type"] == "function_call" and item["status"] == "completed"
        ]
        for response in (whole, last["response"])
    ]
    assert outputs[0] == outputs[1]
    assert set(outputs[0]) <= {ARGUMENTS}


def noted(events: list[ServerSentEvent]) -> list[str]:
    """Return the notes in the events of `Notes`."""
    return [event.data.decode() for event in events if isinstance(event.data, bytes)]


class Notes:
    """A pen that notes what it is to write."""

    def start_block(self, block):
        return [ServerSentEvent(f"open {block.kind} {block.index}".encode())]

    def extend_block(self, block, text):
        return [ServerSentEvent(text.encode())]

    def end_block(self, block):
        return [ServerSentEvent(f"{block.status} {block.index}".encode())]


def test_a_call_that_breaks_later_ends_as_it_is():
    blocks = BlockSplitter(Notes())
    begun = blocks.push(
        [ReasoningDelta("a"), ToolCallStart(0, "c", "f"), ToolCallArgumentsDelta(0, "{")]
    )
    broken = blocks.push([ToolCallAborted(0), ContentDelta("b"), ContentDelta("c")])
    assert noted(begun + broken + blocks.end_block()) == [
        "open reasoning 0",
        "a",
        "completed 0",
        "open call 1",
        "{",
        "incomplete 1",
        "open text 2",
        "b",
        "c",
        "completed 2",
    ]
    assert blocks.end_block() == []


def test_a_call_that_breaks_at_once_is_never_shown():
    blocks = BlockSplitter(Notes())
    call: list[Any] = [
        ToolCallStart(0, "c", "f"),
        ToolCallArgumentsDelta(0, "{"),
        ToolCallAborted(0),
    ]
    good: list[Any] = [ToolCallStart(1, "d", "g"), ToolCallArgumentsDelta(1, "{}")]
    events = blocks.push([ContentDelta("a"), *call, ContentDelta("b"), *good]) + blocks.finish(
        "length"
    )
    assert noted(events) == [
        "open text 0",
        "a",
        "b",
        "completed 0",
        "open call 1",
        "{}",
        "completed 1",
    ]


def test_a_text_at_the_limit_is_incomplete():
    blocks = BlockSplitter(Notes())
    events = blocks.push([ContentDelta("a")]) + blocks.finish("length")
    assert noted(events) == ["open text 0", "a", "incomplete 0"]
