"""OpenAI's client for Python: the Responses API."""

import base64
import json
from typing import Any

import openai
import pydantic
import pytest

from tests.clients.test_openai_chat import STREAMS
from tests.support.http.client_probes import (
    ARGUMENTS,
    MODEL,
    TIME,
    WEATHER,
    say,
    user,
    write_call,
    write_json,
)
from tests.support.http.scripted_server import DEFAULT

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOOLS = [{"type": "function", **WEATHER}, {"type": "function", **TIME}]
CUSTOM = {"type": "custom", "name": "run", "description": "Runs code."}
CALL = write_call("get_weather", **ARGUMENTS)
CODE = 'print("ü")\n'


async def respond(ai: openai.AsyncOpenAI, stream: bool, **fields: Any) -> Any:
    """Return a response, put together by the client where it is streamed."""
    fields = {"model": MODEL, "input": "Hi", **fields}
    if not stream:
        return await ai.responses.create(**fields)
    async with ai.responses.stream(**fields) as events:
        return await events.get_final_response()


def prompt_of(scripted: Any) -> str:
    """What the engine was asked last."""
    return scripted.engine.tokenizer.decode(scripted.engine.calls[-1].prompt, False)


@STREAMS
async def test_a_text(ai, stream):
    response = await respond(ai, stream)
    assert (response.output_text, response.status) == (DEFAULT, "completed")
    assert response.usage.total_tokens > response.usage.output_tokens > 0


@STREAMS
async def test_instructions_and_items(ai, stream, scripted):
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
        *say("Yes."),
    ]
    response = await respond(ai, stream, input=items, instructions="Speak Latin.")
    assert response.output_text == "Yes."
    assert "Speak Latin.\n\nBe brief." in prompt_of(scripted)


@STREAMS
async def test_a_limit(ai, stream):
    asked = {"model": MODEL, "input": "Hi", "max_output_tokens": 4}
    if stream:
        *_, last = [event async for event in await ai.responses.create(stream=True, **asked)]
        response = last.response
    else:
        response = await ai.responses.create(**asked)
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )


@STREAMS
@pytest.mark.parametrize("effort", ["none", "minimal", "medium", "xhigh"])
async def test_reasoning_effort(ai, stream, effort):
    response = await respond(ai, stream, reasoning={"effort": effort, "summary": "auto"})
    assert response.output_text == DEFAULT


@STREAMS
async def test_reasoning(reasoning_ai, stream):
    items = say("<think>\nhm\n</think>\nSo.")
    response = await respond(reasoning_ai, stream, input=items)
    thought, message = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm")
    assert message.content[0].text == "So."
    again = [*items, *response.output, *say("Again.")]
    assert (await respond(reasoning_ai, stream, input=again)).output_text == "Again."


class Answer(pydantic.BaseModel):
    tags: set[str]
    counts: dict[str, int]


@STREAMS
async def test_a_parsed_text(ai, stream):
    items = say(write_json({"tags": ["a"], "counts": {}}))
    if stream:
        async with ai.responses.stream(model=MODEL, input=items, text_format=Answer) as events:
            response = await events.get_final_response()
    else:
        response = await ai.responses.parse(model=MODEL, input=items, text_format=Answer)
    assert response.output_parsed == Answer(tags={"a"}, counts={})


@STREAMS
@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "name": "get_weather"}]
)
async def test_a_call(ai, stream, choice):
    fields = {"input": say(CALL), "tools": TOOLS, "tool_choice": choice}
    (call,) = (await respond(ai, stream, **fields)).output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "get_weather",
        ARGUMENTS,
    )


@STREAMS
async def test_a_result(ai, stream, scripted):
    first = await respond(ai, False, input=say(CALL), tools=TOOLS)
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sunny"}
    items = [*user("How is the weather?"), *first.output, result, *say("Sunny.")]
    response = await respond(ai, stream, input=items, tools=TOOLS)
    assert response.output_text == "Sunny."
    assert "<tool_response>\nsunny\n</tool_response>" in prompt_of(scripted)


@STREAMS
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
async def test_a_format_beside_a_forced_call(ai, stream, choice):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    fields = {
        "input": say(CALL),
        "tools": TOOLS,
        "tool_choice": choice,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
    }
    (call,) = (await respond(ai, stream, **fields)).output
    assert json.loads(call.arguments) == ARGUMENTS
    # Without the forced call the format is that of the message.
    fields |= {"input": say('{"a":1}'), "tool_choice": "auto"}
    assert (await respond(ai, stream, **fields)).output_text == '{"a":1}'


@STREAMS
@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools(ai, stream, mode, scripted):
    allowed = [{"type": "function", "name": "get_weather"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
    fields = {"input": say(CALL), "tools": TOOLS, "tool_choice": choice}
    (call,) = (await respond(ai, stream, **fields)).output
    assert call.name == "get_weather"
    assert "get_time" not in prompt_of(scripted)


@STREAMS
@pytest.mark.parametrize("choice", ["auto", {"type": "custom", "name": "run"}], ids=str)
async def test_a_custom_tool(ai, stream, choice):
    items = say(write_call("run", input=CODE))
    fields = {"input": items, "tools": [CUSTOM, *TOOLS], "tool_choice": choice}
    response = await respond(ai, stream, **fields)
    (call,) = response.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "run", CODE)
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ü"}
    again = [*user("Run it."), *response.output, result, *say("Done.")]
    assert (await respond(ai, stream, input=again, tools=[CUSTOM])).output_text == "Done."


async def test_the_events_of_a_custom_tool(ai):
    items = say(write_call("run", input=CODE))
    fields = {"model": MODEL, "input": items, "tools": [CUSTOM], "stream": True}
    events = [event async for event in await ai.responses.create(**fields)]
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    (done,) = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done.input == CODE
    assert [event.sequence_number for event in events] == list(range(len(events)))


@STREAMS
async def test_a_custom_tool_with_a_format(ai, stream):
    form = {"type": "grammar", "syntax": "regex", "definition": "[a-c]{3}"}
    tool = {**CUSTOM, "format": form}
    (call,) = (await respond(ai, stream, tools=[tool], tool_choice="required")).output
    assert len(call.input) == 3
    assert set(call.input) <= set("abc")


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "Hi"},
        {"input": user("Hi"), "instructions": "Be brief.", "reasoning": {"effort": "low"}},
        {"input": "Hi", "tools": TOOLS, "tool_choice": "auto", "truncation": "disabled"},
        {"input": "Hi", "text": {"format": {"type": "json_object"}}, "parallel_tool_calls": True},
    ],
    ids=lambda one: "-".join(one),
)
async def test_input_tokens(ai, fields):
    counted = await ai.responses.input_tokens.count(model=MODEL, **fields)
    response = await ai.responses.create(model=MODEL, **fields)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == response.usage.input_tokens


@pytest.mark.filterwarnings("ignore:Pydantic serializer")  # its types know no items of users
async def test_compaction(ai, scripted):
    items = [
        *user("My name is Ann."),
        {"role": "assistant", "content": "Hello Ann."},
        *user("Bye."),
    ]
    engine = scripted.engine
    engine.reply = "The user is Ann."
    compacted = await ai.responses.compact(model=MODEL, input=items, instructions="Be brief.")
    engine.reply = DEFAULT
    *messages, item = compacted.output
    assert [one.content[0].text for one in messages] == ["My name is Ann.", "Bye."]
    assert (compacted.object, item.type) == ("response.compaction", "compaction")
    assert compacted.usage.output_tokens > 0
    assert "Hello Ann." in prompt_of(scripted)
    again = [*compacted.output, *say("Ann.")]
    assert (await respond(ai, False, input=again)).output_text == "Ann."
    prompt = prompt_of(scripted)
    assert "assistant\nThe user is Ann.<|im_end|>" in prompt
    assert "user\nMy name is Ann.\nBye.<|im_end|>" in prompt
    assert "Hello Ann." not in prompt


@pytest.mark.parametrize(
    "content", ["", "x", "gllm-summary:!", "gllm-summary:" + base64.b64encode(b"\xff").decode()]
)
async def test_a_compaction_of_another_server(ai, content):
    item = {"type": "compaction", "encrypted_content": content}
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]") as caught:
        await respond(ai, False, input=[item, *user("Hi")])
    assert caught.value.param == "input"


@pytest.mark.parametrize("method", ["create", "compact"])
async def test_an_input_that_is_too_long(ai, method):
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        await getattr(ai.responses, method)(model=MODEL, input="x y " * 3000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


@STREAMS
async def test_errors_name_the_field(ai, stream):
    bad = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "h"}]}
    with pytest.raises(openai.BadRequestError) as caught:
        await respond(ai, stream, tools=TOOLS, tool_choice=bad)
    assert caught.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError) as caught:
        await respond(ai, stream, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
