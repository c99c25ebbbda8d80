"""OpenAI's own client finds what it expects."""

from collections.abc import AsyncIterator

import openai
import pytest

from gllm.text.chat.template import ChatTemplate
from gllm.text.tokenizer import Tokenizer
from tests.frontend.conftest import CHAT, Server
from tests.support.text import tokenizers as some


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    url = str(server.client.make_url("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


async def test_chat(server, client):
    answer = await client.chat.completions.create(model="fake/model", n=2, **CHAT)
    assert [choice.message.content for choice in answer.choices] == [server.engine.reply] * 2
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_chat_stream(server, client):
    stream = await client.chat.completions.create(
        model="fake/model", stream=True, stream_options={"include_usage": True}, **CHAT
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert text == server.engine.reply
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens > 0


async def test_completions(server, client):
    answer = await client.completions.create(model="fake/model", prompt=["a", "b"], max_tokens=64)
    assert [choice.text for choice in answer.choices] == [server.engine.reply] * 2
    stream = await client.completions.create(
        model="fake/model", prompt=[5, 6], max_tokens=64, stream=True
    )
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == server.engine.reply


async def test_logprobs(server, client):
    asked = {"model": "fake/model", "logprobs": True, "top_logprobs": 2, "max_tokens": 6}
    whole = await client.chat.completions.create(**asked, **CHAT)
    told = whole.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in told] == [2] * 6
    stream = await client.chat.completions.create(**asked, stream=True, **CHAT)
    pieces = [c.logprobs.content async for chunk in stream for c in chunk.choices if c.logprobs]
    assert [entry for piece in pieces for entry in piece] == told
    text = await client.completions.create(
        model="fake/model", prompt=[[9, 8, 7]], max_tokens=1, logprobs=1, echo=True
    )
    told = text.choices[0].logprobs
    assert told.token_logprobs[:3] == [None, -1.0, -0.875]
    assert len(told.tokens) == len(told.top_logprobs) == len(told.text_offset) == 4
    refused = {"model": "fake/model", "prompt": "x", "best_of": 2}
    with pytest.raises(openai.BadRequestError, match="beam search"):
        await client.completions.create(**refused)


async def test_responses(server, client):
    asked = {"model": "fake/model", "input": "Hi", "metadata": {"a": "b"}}
    whole = await client.responses.create(**asked)
    assert (whole.output_text, whole.status) == (server.engine.reply, "completed")
    assert whole.usage.input_tokens_details.cached_tokens == 3
    assert whole.usage.output_tokens_details.reasoning_tokens == 0
    events = [event async for event in await client.responses.create(**asked, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == server.engine.reply
    again = [*whole.output, {"role": "user", "content": "And then?"}]
    assert (await client.responses.create(model="fake/model", input=again)).output_text


async def test_responses_streamed_with_their_state(server, client):
    asked = {"model": "fake/model", "input": "Hi"}
    async with client.responses.stream(**asked) as stream:
        snapshots = [e.snapshot async for e in stream if e.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert snapshots[-1] == final.output_text == server.engine.reply
    server.engine.fail_after = 3
    async with client.responses.stream(**asked) as stream:
        *_, last = [event async for event in stream]
    assert (last.type, last.response.error.code) == ("response.failed", "generation_failed")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(**asked, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


async def test_models(client):
    assert [model.id async for model in client.models.list()] == ["fake/model"]
    assert (await client.models.retrieve("fake/model")).id == "fake/model"


async def test_errors_are_its_own_kinds(server, client):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="fake/model", temperature=9, **CHAT)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other", **CHAT)
    server.engine.fail_after = 3
    stream = await client.chat.completions.create(model="fake/model", stream=True, **CHAT)
    with pytest.raises(openai.APIError, match="logits are not finite"):
        _ = [chunk async for chunk in stream]


async def test_stopping_a_stream_aborts_it(server, client):
    server.engine.delay = 0.05
    stream = await client.chat.completions.create(model="fake/model", stream=True, **CHAT)
    await anext(aiter(stream))
    await stream.close()
    await server.idle()
    assert not server.engine.calls[0].finished


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


async def test_tools_and_reasoning(server, client):
    source = "{{ tools }}" + some.CHATML + '{# <tool_call> "arguments" </think> #}'
    server.engine.tokenizer = Tokenizer(some.byte_level(), ChatTemplate(source, {}))
    server.engine.reply = (
        '<think>hm</think>So:\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    )
    asked = {"model": "fake/model", "tools": TOOLS, "tool_choice": "auto", **CHAT}
    choice = (await client.chat.completions.create(**asked)).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning == choice.message.reasoning_content == "hm"
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'
    async with client.chat.completions.stream(**asked) as stream:
        done = [
            event async for event in stream if event.type == "tool_calls.function.arguments.done"
        ]
        last = await stream.get_final_completion()
    assert [(event.name, event.arguments) for event in done] == [("f", '{"a": 1}')]
    message = last.choices[0].message
    assert (message.content, last.choices[0].finish_reason) == ("So:", "tool_calls")
    assert message.tool_calls[0].function.name == "f"
    history = [
        *CHAT["messages"],
        choice.message,
        {"role": "tool", "tool_call_id": "x", "content": "7"},
    ]
    server.engine.reply = "It is 7."
    answer = await client.chat.completions.create(model="fake/model", messages=history, tools=TOOLS)
    assert answer.choices[0].message.content == "It is 7."
