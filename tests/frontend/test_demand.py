"""What an output has to be is told to the engine as a grammar, which lets right ones through."""

import json

import pytest

from gllm.text.output.reasoning import REASONING
from tests.frontend.conftest import CHAT_PATH
from tests.frontend.test_tools import CALLS, MARKS, NAMED, TOOLS, WITH_TOOLS, said, serve
from tests.text import tokenizers_for_tests as some
from tests.text.output.formats import FORMATS
from tests.text.output.judge import Judge

TAGS = [tag for one in REASONING.values() for tag in (one.opening, one.closing)]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def judge_of(server):
    """What the engine was asked last to keep to."""
    structured = server.engine.calls[-1].params.structured
    assert structured is not None
    return Judge(server.engine.tokenizer, structured.grammar)


@pytest.mark.parametrize("name", MARKS)
async def test_demanded_calls(server, name):
    write = next(write for row, write in FORMATS if row == name)
    fences = "```json" if name == "deepseek" else ""
    serve(server, f"{WITH_TOOLS}{{# {MARKS[name]} {fences} #}}", "[TOOL_CALLS]", "<tool_call>")
    calls = [("get_weather", {"city": "Köln"}), ("f", {})]
    server.engine.reply = write(calls)
    answer = await server.chat(tools=TOOLS, tool_choice="required")
    choice = answer.json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert said([call["function"] for call in choice["message"]["tool_calls"]]) == calls
    judge = judge_of(server)
    assert judge.takes(write(calls[: 1 if name == "llama3" else 2]))
    assert not judge.takes("Hello")
    assert (await server.chat(tools=TOOLS, tool_choice=NAMED)).status == 200
    judge = judge_of(server)
    assert judge.takes(write(calls[1:]))
    assert not judge.takes(write(calls[:1]))
    assert not judge.takes(write(calls[1:] * 2))


async def test_calls_that_are_not_demanded_are_not_bound(server):
    serve(server, f"{WITH_TOOLS}{{# {MARKS['hermes']} </think> #}}")
    for choice in (None, "auto", "none"):
        assert (await server.chat(tools=TOOLS, tool_choice=choice)).status == 200
        assert server.engine.calls[-1].params.structured is None


async def test_reasoning_comes_before_what_is_demanded(server):
    serve(server, f"{WITH_TOOLS}{{# {MARKS['hermes']} </think> #}}", *TAGS)
    call = FORMATS[0][1](CALLS[:1])
    await server.chat(tools=TOOLS, tool_choice="required")
    judge = judge_of(server)
    assert judge.takes(call)
    assert judge.takes(f"<think>\nhm\n</think>\n\n{call}")
    assert not judge.takes("<think>\nhm\n</think>\n\nso")


OPENS = some.CHATML + "{% if add_generation_prompt %}<think>\n{% endif %}"
ASKED = [
    ({"response_format": FORMAT}, '{"a":7}', '{"b":7}'),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a":7}', "7"),
    ({"structured_outputs": {"regex": r"a/b|c\/d|[\\\n]"}}, "a/b", "a/"),
    ({"structured_outputs": {"regex": r"a/b|c\/d|[\\\n]"}}, "c/d", "cd"),
    ({"structured_outputs": {"regex": "[a\n]b"}}, "ab", "b"),
    ({"structured_outputs": {"choice": ["yes", 'n"o', "::="]}}, 'n"o', "maybe"),
    ({"structured_outputs": {"choice": ["yes", 'n"o', "::="]}}, "::=", ":"),
]


@pytest.mark.parametrize(("fields", "good", "bad"), ASKED)
async def test_structured_answers_of_models_that_reason(server, fields, good, bad):
    serve(server, OPENS, *TAGS)
    server.engine.reply = f"hm</think>{good}"
    answer = await server.chat(**fields)
    message = answer.json["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", good)
    judge = judge_of(server)
    assert judge.takes(f"hm</think>\n\n{good}")
    assert not judge.takes(f"hm</think>{bad}")
    assert not judge.takes(good)


async def test_structured_answers_beside_calls(server):
    serve(server, f"{WITH_TOOLS}{{# {MARKS['hermes']} #}}")
    await server.chat(tools=TOOLS, response_format=FORMAT)
    judge = judge_of(server)
    assert judge.takes('{"a":7}')
    assert judge.takes(FORMATS[0][1](CALLS))
    assert not judge.takes("Hello")


async def test_a_grammar_of_the_requests_own_is_the_whole_output(server):
    serve(server, OPENS, *TAGS)
    server.engine.reply = "hm"
    answer = await server.chat(structured_outputs={"grammar": 'start: "hm"'})
    assert answer.json["choices"][0]["message"] == {"role": "assistant", "content": "hm"}
    assert server.engine.calls[-1].params.structured.grammar == 'start: "hm"'


async def test_without_reasoning_and_calls_it_is_as_asked(server):
    await server.chat(response_format=FORMAT)
    assert server.engine.calls[-1].params.structured.json == SCHEMA


async def test_demands_that_cannot_be(server):
    serve(server, WITH_TOOLS, tool_call_parser="none")
    for choice in ("required", NAMED):
        answer = await server.chat(tools=TOOLS, tool_choice=choice)
        assert (answer.status, answer.error["param"]) == (400, "tool_choice")
    serve(server, WITH_TOOLS, tool_call_parser="hermes")
    answer = await server.chat(tools=TOOLS, tool_choice="required", response_format=FORMAT)
    assert (answer.status, answer.error["param"]) == (400, "tool_choice")
    answer = await server.chat(tool_choice="required")
    assert (answer.status, answer.error["param"]) == (400, "tool_choice")
    bad = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "bogus": 1}}}
    for fields in ({"tools": TOOLS}, {}):
        answer = await server.post(
            CHAT_PATH,
            {"messages": [{"role": "user", "content": "x"}], **fields, "response_format": bad},
        )
        if fields:
            assert (answer.status, answer.error["param"]) == (400, "response_format")
