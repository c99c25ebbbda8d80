"""OpenAI's client for Python: tools of chats, in every form that it has had."""

import json
from typing import Any

import openai
import pydantic
import pytest

from tests.clients.test_openai_chat import STREAMS, chat
from tests.support.http.client_probes import ARGUMENTS, MODEL, TOOLS, WEATHER, say, user, write_call

pytestmark = pytest.mark.asyncio(loop_scope="module")
CALL = write_call("get_weather", **ARGUMENTS)
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CODE = 'print("ü")\n'


def custom(**more: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "run", "description": "Runs code.", **more}}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def called(choice: Any) -> list[tuple[str, Any]]:
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    calls = [call.function for call in choice.message.tool_calls]
    return [(one.name, json.loads(one.arguments)) for one in calls]


@STREAMS
@pytest.mark.parametrize("choice", [None, "auto", "required", NAMED], ids=str)
async def test_a_call(ai, stream, choice):
    fields = {} if choice is None else {"tool_choice": choice}
    answer = await chat(ai, stream, messages=say(CALL), tools=TOOLS, **fields)
    assert called(answer) == [("get_weather", ARGUMENTS)]


@STREAMS
@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
async def test_a_forced_call_of_a_model_that_would_not(ai, stream, choice):
    answer = await chat(ai, stream, tools=TOOLS, tool_choice=choice)
    names = {name for name, _ in called(answer)}
    assert names <= ({"get_weather"} if choice == NAMED else {"get_weather", "get_time"})


@STREAMS
async def test_several_calls(ai, stream):
    script = f"{CALL}\n{write_call('get_time')}"
    answer = await chat(ai, stream, messages=say(script), tools=TOOLS, tool_choice="required")
    assert called(answer) == [("get_weather", ARGUMENTS), ("get_time", {})]


@STREAMS
async def test_no_call(ai, stream):
    for choice in ("none", "auto"):
        answer = await chat(ai, stream, messages=say("Sunny."), tools=TOOLS, tool_choice=choice)
        assert (answer.message.content, answer.finish_reason) == ("Sunny.", "stop")


@STREAMS
async def test_a_result(ai, stream, scripted):
    choice = await chat(ai, False, messages=say(CALL), tools=TOOLS)
    messages = [
        *user("How is the weather?"),
        choice.message,
        {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "sunny"},
        *say("It is sunny."),
    ]
    answer = await chat(ai, stream, messages=messages, tools=TOOLS)
    assert answer.message.content == "It is sunny."
    prompt = scripted.engine.tokenizer.decode(scripted.engine.calls[-1].prompt, False)
    assert '"arguments": {"city": "Rome", "days": 3}' in prompt
    assert "<tool_response>\nsunny\n</tool_response>" in prompt


class GetWeather(pydantic.BaseModel):
    """Get the weather of a city."""

    city: str
    days: int


@STREAMS
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_a_parsed_call(ai, stream, choice):
    fields = {
        "model": MODEL,
        "messages": say(write_call("GetWeather", **ARGUMENTS)),
        "tools": [openai.pydantic_function_tool(GetWeather)],
        "tool_choice": choice,
    }
    if stream:
        async with ai.chat.completions.stream(**fields) as events:
            answer = await events.get_final_completion()
    else:
        answer = await ai.chat.completions.parse(**fields)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == GetWeather(**ARGUMENTS)


@STREAMS
@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools(ai, stream, mode, scripted):
    choice = allowed(mode, NAMED)
    answer = await chat(ai, stream, messages=say(CALL), tools=TOOLS, tool_choice=choice)
    assert called(answer) == [("get_weather", ARGUMENTS)]
    prompt = scripted.engine.tokenizer.decode(scripted.engine.calls[-1].prompt, False)
    assert "get_time" not in prompt


@STREAMS
async def test_a_tool_that_is_not_allowed_is_not_called(ai, stream):
    script = write_call("get_time")
    fields = {"messages": say(script), "tools": TOOLS, "tool_choice": allowed("auto", NAMED)}
    answer = await chat(ai, stream, **fields)
    assert (answer.message.content, answer.finish_reason) == (script, "stop")


async def custom_call(ai: openai.AsyncOpenAI, stream: bool, **fields: Any) -> Any:
    """Return the one call of a custom tool, and the finish reason. The client's own assembly of
    streams knows functions alone."""
    fields = {"model": MODEL, "messages": user("Hi"), **fields}
    if not stream:
        (choice,) = (await ai.chat.completions.create(**fields)).choices
        (call,) = choice.message.tool_calls
        assert call.type == "custom"
        return call.custom.name, call.custom.input, choice.finish_reason
    name, text, reason = "", "", None
    async for chunk in await ai.chat.completions.create(stream=True, **fields):
        (choice,) = chunk.choices
        for piece in choice.delta.tool_calls or ():
            custom = piece.model_extra["custom"]
            name += custom.get("name", "")
            text += custom["input"]
        reason = choice.finish_reason or reason
    return name, text, reason


@STREAMS
@pytest.mark.parametrize("choice", ["auto", "required", custom()], ids=["auto", "required", "own"])
async def test_a_custom_tool(ai, stream, choice):
    fields = {
        "messages": say(write_call("run", input=CODE)),
        "tools": [custom(), *TOOLS],
        "tool_choice": choice,
    }
    assert await custom_call(ai, stream, **fields) == ("run", CODE, "tool_calls")


@STREAMS
async def test_a_custom_tool_with_a_format(ai, stream):
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "SELECT [a-z]{2,5}"}}
    name, text, _ = await custom_call(
        ai, stream, tools=[custom(format=form)], tool_choice="required"
    )
    assert name == "run"
    assert text.startswith("SELECT ")
    assert text[7:].isalpha()


async def test_a_format_that_is_not_enforced_is_refused(ai):
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
    with pytest.raises(openai.BadRequestError, match="use regex") as caught:
        await chat(ai, False, tools=[custom(format=form)])
    assert caught.value.param == "tools"


async def test_the_result_of_a_custom_tool(ai, scripted):
    fields = {"messages": say(write_call("run", input=CODE)), "tools": [custom()]}
    message = (await chat(ai, False, **fields)).message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "ü"}
    messages = [*user("Run it."), message, result, *say("Done.")]
    answer = await chat(ai, False, messages=messages, tools=[custom()])
    assert answer.message.content == "Done."
    prompt = scripted.engine.tokenizer.decode(scripted.engine.calls[-1].prompt, False)
    assert json.dumps({"input": CODE}, ensure_ascii=False) in prompt


@STREAMS
@pytest.mark.parametrize("choice", [None, "auto", {"name": "get_weather"}], ids=str)
async def test_the_older_functions(ai, stream, choice):
    fields = {} if choice is None else {"function_call": choice}
    answer = await chat(ai, stream, messages=say(CALL), functions=[WEATHER], **fields)
    assert answer.finish_reason == "function_call"
    function = answer.message.function_call
    assert (function.name, json.loads(function.arguments)) == ("get_weather", ARGUMENTS)
    assert not answer.message.tool_calls


@STREAMS
async def test_no_function(ai, stream):
    fields = {"messages": say("Sunny."), "functions": [WEATHER], "function_call": "none"}
    answer = await chat(ai, stream, **fields)
    assert (answer.message.content, answer.finish_reason) == ("Sunny.", "stop")


async def test_the_result_of_a_function(ai, scripted):
    message = (await chat(ai, False, messages=say(CALL), functions=[WEATHER])).message
    messages = [
        *user("How is the weather?"),
        message,
        {"role": "function", "name": "get_weather", "content": "sunny"},
        *say("It is sunny."),
    ]
    answer = await chat(ai, False, messages=messages, functions=[WEATHER])
    assert answer.message.content == "It is sunny."
    prompt = scripted.engine.tokenizer.decode(scripted.engine.calls[-1].prompt, False)
    assert "<tool_response>\nsunny\n</tool_response>" in prompt


async def test_functions_beside_tools_are_refused(ai):
    with pytest.raises(openai.BadRequestError) as caught:
        await chat(ai, False, functions=[WEATHER], tools=TOOLS)
    assert caught.value.param == "functions"


async def test_a_strict_function_is_checked(ai):
    schema = {"type": "object", "properties": {"a": {"contains": {"const": 1}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    with pytest.raises(openai.BadRequestError, match="'contains'"):
        await chat(ai, False, tools=[tool], tool_choice="required")
