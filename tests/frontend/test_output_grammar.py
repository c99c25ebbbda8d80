"""What an output has to be is told to the engine as a grammar, which lets right ones through."""

import json
from typing import Any

import pytest

from gllm.text.output.registry import REASONING_TAGS
from tests.frontend.conftest import CHAT, CHAT_PATH
from tests.frontend.test_tools import CALLS, MARKS, NAMED, TOOLS, WITH_TOOLS, said, serve
from tests.support.text import tokenizers as some
from tests.support.text.judge import Judge
from tests.support.text.tool_formats import FORMATS, SINGLE

TAGS = [tag for one in REASONING_TAGS.values() for tag in one.tokens]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


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
    assert judge.takes(write(calls[: 1 if name in SINGLE else 2]))
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
    grammar = {"structured_outputs": {"grammar": 'start: "hm"'}}
    answer = await server.chat(tools=TOOLS, tool_choice="required", **grammar)
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


FORCED = [
    ("/v1/chat/completions", {**CHAT, "response_format": FORMAT}, "required", NAMED),
    (
        "/v1/responses",
        {"input": "Hi", "text": {"format": {"type": "json_schema", **FORMAT["json_schema"]}}},
        "required",
        {"type": "function", "name": "f"},
    ),
    (
        "/v1/messages",
        {
            **CHAT,
            "max_tokens": 99,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
        {"type": "any"},
        {"type": "tool", "name": "f"},
    ),
]
NAMES = {"parameters": "input_schema"}


def tools_of(path):
    """The tools as an endpoint takes them."""
    functions = [tool["function"] for tool in TOOLS]
    if path == "/v1/messages":
        return [{NAMES.get(key, key): one[key] for key in one} for one in functions]
    return TOOLS if "chat" in path else [{"type": "function", **one} for one in functions]


@pytest.mark.parametrize(("path", "body", "any_tool", "named"), FORCED)
async def test_a_format_beside_a_forced_call_is_that_of_messages(
    server, path, body, any_tool, named
):
    serve(server, f"{WITH_TOOLS}{{# {MARKS['hermes']} #}}")
    for choice in (any_tool, named):
        answer = await server.post(path, {**body, "tools": tools_of(path), "tool_choice": choice})
        assert answer.status == 200, answer.json
        judge = judge_of(server)
        assert judge.takes(FORMATS[0][1](CALLS[1:]))
        assert not judge.takes('{"a":7}')


async def test_a_bad_format_beside_a_forced_call_is_refused(server):
    serve(server, f"{WITH_TOOLS}{{# {MARKS['hermes']} #}}")
    bad = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "bogus": 1}}}
    answer = await server.chat(tools=TOOLS, tool_choice="required", response_format=bad)
    assert (answer.status, answer.error["param"]) == (400, "response_format")


def objects(**more):
    """A function whose arguments hold an object that says nothing about other properties."""
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}}
    listed = {"type": "object", "properties": {"inner": inner, "free": {"type": "object"}}}
    return {"name": "f", "parameters": listed, **more}


@pytest.mark.parametrize("strict", [None, False, True])
async def test_objects_are_closed_by_one_rule_for_calls_and_answers(server, strict):
    serve(server, f"{WITH_TOOLS}{{# {MARKS['hermes']} #}}")
    function = objects(strict=strict)
    asked: dict[str, Any] = {
        "type": "json_schema",
        "json_schema": {"schema": function["parameters"]},
    }
    asked["json_schema"]["strict"] = strict
    tools = [{"type": "function", "function": function}]
    for fields, before, after in (
        (
            {"tool_choice": "required"},
            '<tool_call>\n{"name": "f", "arguments": ',
            "}\n</tool_call>",
        ),
        ({"response_format": asked}, "", ""),
    ):
        assert (await server.chat(tools=tools, **fields)).status == 200
        judge = judge_of(server)

        def takes(value, before=before, after=after, judge=judge):
            separators = None if before else (",", ":")
            return judge.takes(before + json.dumps(value, separators=separators) + after)

        assert takes({"inner": {"a": 1}})
        assert not takes({"inner": {"a": 1, "b": 2}})
        assert not takes({"other": 1})
        assert takes({"free": {}})
        assert takes({"free": {"any": 1}}) == (not strict)


async def test_a_strict_function_has_to_be_enforced(server):
    serve(server, f"{WITH_TOOLS}{{# {MARKS['hermes']} #}}")
    schema = {"type": "object", "properties": {"a": {"type": "array", "contains": {"const": 1}}}}
    for strict, status in ((None, 200), (False, 200), (True, 400)):
        function = {"name": "f", "parameters": schema, "strict": strict}
        tools = [{"type": "function", "function": function}]
        answer = await server.chat(tools=tools, tool_choice="required")
        assert answer.status == status
    assert answer.error["param"] == "tools"
    assert "'contains'" in answer.error["message"]


@pytest.mark.parametrize(
    "odd",
    [
        {"type": "string", "pattern": "^(?=a)a$"},
        {"type": "string", "pattern": r"\bword\b"},
        {"type": "any"},
        {"type": "string", "minLength": "1"},
    ],
)
async def test_what_the_compiler_refuses_is_not_enforced_in_tools_that_are_not_strict(server, odd):
    serve(server, f"{WITH_TOOLS}{{# {MARKS['hermes']} #}}")
    schema = {"type": "object", "properties": {"a": odd, "b": {"type": "null"}}, "required": ["b"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert (await server.chat(tools=tools, tool_choice="required")).status == 200
    judge = judge_of(server)
    assert judge.takes(FORMATS[0][1]([("f", {"a": "any", "b": None})]))
    assert not judge.takes(FORMATS[0][1]([("f", {"a": "any", "b": 1})]))


@pytest.mark.parametrize(("parallel", "several"), [(None, True), (True, True), (False, False)])
async def test_parallel_calls_can_be_forbidden(server, parallel, several):
    serve(server, f"{WITH_TOOLS}{{# {MARKS['hermes']} #}}")
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": parallel}
    assert (await server.chat(**fields)).status == 200
    judge = judge_of(server)
    assert judge.takes(FORMATS[0][1](CALLS[1:]))
    assert judge.takes(FORMATS[0][1](CALLS)) == several
    choice = {"type": "any", "disable_parallel_tool_use": parallel is False}
    body = {**CHAT, "max_tokens": 9, "tools": tools_of("/v1/messages"), "tool_choice": choice}
    assert (await server.post("/v1/messages", body)).status == 200
    assert judge_of(server).takes(FORMATS[0][1](CALLS)) == several
