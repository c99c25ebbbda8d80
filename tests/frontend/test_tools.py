"""Tool calls and reasoning over HTTP, whole and streamed."""

import json
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken

from gllm.frontend.context import CONTEXT
from gllm.text.chat.template import ChatTemplate
from gllm.text.tokenizer import Tokenizer
from tests.frontend.conftest import CHAT, CHAT_PATH
from tests.support.text import tokenizers as some
from tests.support.text.tool_formats import FORMATS

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "What it is like outside",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
]
NAMED = {"type": "function", "function": {"name": "f"}}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'Köln "am Rhein" 🎉'}),
    ("f", {"n": [1, 2]}),
]
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + some.CHATML
THINKS = some.CHATML + "{# </think> #}"
OPENS = some.CHATML + "{% if add_generation_prompt %}<think>\n{% endif %}"
MARKS = {
    "hermes": '<tool_call> "arguments"',
    "qwen3_coder": "<function= <parameter=",
    "glm45": "<arg_key>",
    "glm4": "<|observation|>",
    "llama3": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "deepseek": "<｜tool▁calls▁begin｜>",
    "harmony": "<|channel|>commentary",
}


def serve(server, source, *special, **config):
    """Let the server have a model with this template, these special tokens and these flags."""
    backend = some.byte_level()
    backend.add_tokens([AddedToken(token, special=True) for token in special])
    server.engine.tokenizer = Tokenizer(backend, ChatTemplate(source, {}))
    server.engine.max_model_len = 4096
    context = server.client.server.app[CONTEXT]
    context.config = replace(context.config, **config)
    context.output_parsers = context.config.output_parsers


def prompt_of(server):
    """What the engine was asked last, as text."""
    return server.engine.tokenizer.decode(server.engine.calls[-1].prompt, False)


def assembled(events, index=0):
    """What a client makes of a choice's events: a message and its finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    reason = None
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["tool_calls"]):
                    assert call["type"] == "function"
                    assert call["function"]["arguments"] == ""
                    function = {"name": call["function"]["name"], "arguments": ""}
                    message["tool_calls"].append({"id": call["id"], **function})
                    continue
                assert call["index"] == len(message["tool_calls"]) - 1
                message["tool_calls"][-1]["arguments"] += call["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    return message, reason


def said(calls):
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


QUICK = ("hermes", "qwen3_coder", "deepseek31")


@pytest.mark.parametrize(
    ("name", "write"),
    [
        # The parsers of the others have tests of their own.
        pytest.param(*row, marks=[] if row[1].__name__ in QUICK else [pytest.mark.full])
        for row in FORMATS
    ],
    ids=[write.__name__ for _, write in FORMATS],
)
async def test_calls(server, name, write):
    if name in MARKS:
        serve(server, f"{WITH_TOOLS}{{# {MARKS[name]} #}}")
    else:
        serve(server, WITH_TOOLS, tool_call_parser=name)
    server.engine.reply = write(CALLS)
    answer = await server.chat(tools=TOOLS)
    choice = answer.json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"].keys() == {"role", "content", "tool_calls"}
    assert choice["message"]["content"] is None
    calls = choice["message"]["tool_calls"]
    assert [call["type"] for call in calls] == ["function"] * 2
    assert said([call["function"] for call in calls]) == CALLS
    assert len({call["id"] for call in calls}) == 2
    assert prompt_of(server).startswith('[{"type": "function", "function": {"name": "f", ')
    server.engine.delay = 0.0005  # a delta for each token, nearly
    events = await server.stream(CHAT_PATH, tools=TOOLS, tool_choice="auto")
    message, reason = assembled(events)
    assert (message["content"], reason) == ("", "tool_calls")
    assert said(message["tool_calls"]) == CALLS


async def test_text_beside_calls(server):
    serve(server, f"{WITH_TOOLS}{{# {MARKS['hermes']} #}}")
    server.engine.reply = 'I look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    message = (await server.chat(tools=TOOLS)).json["choices"][0]["message"]
    assert message["content"] == "I look."
    streamed, reason = assembled(await server.stream(CHAT_PATH, tools=TOOLS, n=2), index=1)
    assert (streamed["content"], reason) == ("I look.", "tool_calls")
    assert said(streamed["tool_calls"]) == [("f", {})]


async def test_no_calls(server):
    serve(server, f"{WITH_TOOLS}{{# {MARKS['llama3']} #}}")
    server.engine.reply = '{"name": "Otto", "parameters": {}} is a fox. \n'
    choice = (await server.chat(tools=TOOLS)).json["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": server.engine.reply}
    assert choice["finish_reason"] == "stop"
    message, reason = assembled(await server.stream(CHAT_PATH, tools=TOOLS))
    assert (message["content"], reason) == (server.engine.reply, "stop")


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_without_tools_nothing_is_looked_for(server, fields):
    serve(server, f"{WITH_TOOLS}{{# {MARKS['hermes']} #}}")
    server.engine.reply = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
    choice = (await server.chat(**fields)).json["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": server.engine.reply}
    assert "get_weather" not in prompt_of(server)
    assert (assembled(await server.stream(CHAT_PATH, **fields)))[0]["content"] == choice["message"][
        "content"
    ]


async def test_broken_calls_are_content(server):
    serve(server, f"{WITH_TOOLS}{{# {MARKS['hermes']} #}}")
    server.engine.reply = '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>'
    choice = (await server.chat(tools=TOOLS)).json["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": server.engine.reply}
    assert choice["finish_reason"] == "stop"
    message, reason = assembled(await server.stream(CHAT_PATH, tools=TOOLS))
    assert (message["content"], reason) == (server.engine.reply, "stop")
    assert [call["arguments"] for call in message["tool_calls"]] == ['{"a": ']
    # So is one that max_tokens cut off.
    choice = (await server.chat(tools=TOOLS, max_tokens=20)).json["choices"][0]
    assert choice["finish_reason"] == "length"
    assert server.engine.reply.startswith(choice["message"]["content"])


async def test_models_without_a_place_for_tools(server):
    serve(server, some.CHATML + f"{{# {MARKS['hermes']} #}}")
    answer = await server.chat(tools=TOOLS)
    assert (answer.status, answer.error["param"]) == (400, "tools")
    assert "does not support tools" in answer.error["message"]
    assert (await server.chat(tools=TOOLS, tool_choice="none")).status == 200


async def test_models_of_no_known_family(server):
    serve(server, WITH_TOOLS)
    answer = await server.chat(tools=TOOLS)
    assert (answer.status, answer.error["param"]) == (400, "tools")
    assert "--tool-call-parser" in answer.error["message"]
    server.engine.reply = '[TOOL_CALLS]f[ARGS]{"a": 1}'
    serve(server, WITH_TOOLS, tool_call_parser="none")
    assert (await server.chat(tools=TOOLS)).json["choices"][0]["message"]["content"] == (
        server.engine.reply
    )
    serve(server, WITH_TOOLS, tool_call_parser="mistral")
    call = (await server.chat(tools=TOOLS)).json["choices"][0]["message"]["tool_calls"][0]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert len(call["id"]) == 9


async def test_answers_of_tools_come_back(server):
    serve(server, WITH_TOOLS)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "seven"},
    ]
    assert (await server.chat(messages=messages)).status == 200
    assert "tool\nseven" in prompt_of(server)


async def test_a_call_ends_an_answer_of_gpt_oss(server):
    source = f"{WITH_TOOLS}{{# {MARKS['harmony']} <|channel|>analysis<|message|> #}}"
    serve(server, source, "<|call|>")
    call = server.engine.tokenizer.token_to_id("<|call|>")
    for fields in ({"tools": TOOLS}, {}, {"stop_token_ids": [call]}):
        assert (await server.chat(**fields)).status == 200
        assert server.engine.calls[-1].params.stop_token_ids == (call,)


async def test_special_tokens_reach_the_parser_alone(server):
    source = f"{WITH_TOOLS}{{# {MARKS['mistral']} [THINK] #}}"
    serve(server, source, "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[OTHER]")
    server.engine.reply = '[THINK]hm[OTHER][/THINK]So[OTHER][TOOL_CALLS]f[ARGS]{"a": 1}<|im_end|>'
    message = (await server.chat(tools=TOOLS)).json["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "So")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    message, _ = assembled(await server.stream(CHAT_PATH, tools=TOOLS))
    assert (message["reasoning"], message["content"]) == ("hm", "So")
    serve(server, source, "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", reasoning_parser="none")
    message = (await server.chat()).json["choices"][0]["message"]
    assert message["content"] == 'hm[OTHER]So[OTHER]f{"a": 1}'


REPLY = "<think>\nHm, fox or hare?\n</think>\n\nA fox."


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning(server, stream):
    serve(server, THINKS, "<think>", "</think>")
    server.engine.reply = REPLY
    body = {"n": 2, "stream": stream}
    if stream:
        events = await server.stream(CHAT_PATH, n=2, stream_options={"include_usage": True})
        usage = events[-1]["usage"]
        message, reason = assembled(events, index=1)
    else:
        answer = await server.chat(**body)
        usage = answer.json["usage"]
        message, reason = (answer.json["choices"][1][k] for k in ("message", "finish_reason"))
        assert message["reasoning_content"] == message["reasoning"]
    assert (message["reasoning"], message["content"]) == ("Hm, fox or hare?", "A fox.")
    assert reason == "stop"
    ids = server.engine.tokenizer.encode(REPLY)
    count = 2 * (1 + ids.index(server.engine.tokenizer.token_to_id("</think>")))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": count}


async def test_reasoning_that_the_prompt_has_begun(server):
    serve(server, OPENS, "<think>", "</think>")
    server.engine.reply = REPLY.removeprefix("<think>\n")
    answer = await server.chat()
    message = answer.json["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm, fox or hare?", "A fox.")
    details = answer.json["usage"]["completion_tokens_details"]
    ids = server.engine.tokenizer.encode(server.engine.reply)
    assert details["reasoning_tokens"] == 1 + ids.index(
        server.engine.tokenizer.token_to_id("</think>")
    )
    cut = (await server.chat(max_tokens=4)).json["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == (None, "length")
    assert "Hm, fox or hare?".startswith(cut["message"]["reasoning"])
    assert (await server.chat(add_generation_prompt=False)).json["choices"][0]["message"] == {
        "role": "assistant",
        "content": server.engine.reply,
    }


async def test_reasoning_is_not_counted_where_tags_are_no_tokens(server):
    serve(server, THINKS)
    server.engine.reply = REPLY
    answer = await server.chat()
    assert answer.json["choices"][0]["message"]["reasoning"] == "Hm, fox or hare?"
    assert "completion_tokens_details" not in answer.json["usage"]


async def test_log_probabilities_and_ids_of_tokens_that_are_held_back(server):
    serve(server, f"{WITH_TOOLS}{{# {MARKS['hermes']} </think> #}}")
    server.engine.reply = f"{REPLY}\n" + FORMATS[0][1](CALLS)
    options = {"logprobs": True, "return_token_ids": True, "tools": TOOLS}
    whole = (await server.chat(**options)).json["choices"][0]
    events = await server.stream(CHAT_PATH, **options)
    choices = [event["choices"][0] for event in events]
    ids = [token for choice in choices for token in choice.get("token_ids", [])]
    told = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert ids == whole["token_ids"] == server.engine.tokenizer.encode(server.engine.reply)
    assert told == whole["logprobs"]["content"]


SWITCH = some.CHATML + "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"
LEVELS = some.CHATML + "[{{ reasoning_effort }}]{# <think> #}"
EFFORTS = [
    (SWITCH, {"reasoning_effort": "none"}, "[False]"),
    (SWITCH, {"reasoning_effort": "minimal"}, "[False]"),
    (SWITCH, {"reasoning_effort": "low"}, "[True]"),
    (SWITCH, {}, "assistant\n"),
    (SWITCH, {"chat_template_kwargs": {"enable_thinking": False}}, "[False]"),
    (
        SWITCH,
        {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
        "[False]",
    ),
    (LEVELS, {"reasoning_effort": "high"}, "[high]"),
    (LEVELS, {"chat_template_kwargs": {"reasoning_effort": "low"}}, "[low]"),
    (some.CHATML, {"reasoning_effort": "none"}, "assistant\n"),
]


@pytest.mark.parametrize(("source", "fields", "end"), EFFORTS)
async def test_reasoning_effort(server, source, fields, end):
    serve(server, source)
    assert (await server.chat(**fields)).status == 200
    assert prompt_of(server).endswith(end)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT_PATH, lambda effort: {**CHAT, "reasoning_effort": effort}),
        ("/v1/responses", lambda effort: {"input": "Hi", "reasoning": {"effort": effort}}),
        (
            "/v1/messages",
            lambda effort: {**CHAT, "max_tokens": 9, "output_config": {"effort": effort}},
        ),
        ("/tokenize", lambda effort: {**CHAT, "reasoning_effort": effort}),
    ],
)
async def test_effort_has_no_effect_without_reasoning(server, path, field):
    plain = (await server.post("/tokenize", CHAT)).json["tokens"]
    for effort in ("none", "minimal", "low", "high", "xhigh", "max"):
        answer = await server.post(path, field(effort))
        assert answer.status == 200, answer.json
        prompt = answer.json["tokens"] if path == "/tokenize" else server.engine.calls[-1].prompt
        assert prompt == plain, effort


async def test_effort_of_a_model_that_always_reasons(server):
    serve(server, THINKS)
    for effort in ("minimal", "low", "high"):
        assert (await server.chat(reasoning_effort=effort)).status == 200
    answer = await server.chat(reasoning_effort="none")
    assert (answer.status, answer.error["param"]) == (400, "reasoning_effort")
    assert "always reasons" in answer.error["message"]


async def test_continued_message(server):
    serve(server, OPENS + "{# </think> #}", "<think>", "</think>")
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Once upon a "},
    ]
    server.engine.reply = "time"
    for prompt in (False, None):
        answer = await server.chat(
            messages=messages, continue_final_message=True, add_generation_prompt=prompt
        )
        assert answer.json["choices"][0]["message"]["content"] == "time"
        assert prompt_of(server).endswith("<|im_start|>assistant\nOnce upon a ")
    messages[1]["content"] = "<think>Once upon"
    server.engine.reply = " a time</think>So"
    answer = await server.chat(messages=messages, continue_final_message=True)
    message = answer.json["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (" a time", "So")
    for fields in (
        {"continue_final_message": True, "add_generation_prompt": True},
        {"continue_final_message": True},
    ):
        answer = await server.chat(**fields)
        assert (answer.status, answer.error["param"]) == (400, "continue_final_message")


async def test_continued_reasoning(server):
    """A message whose content is null was cut off while the model still reasoned."""
    reasons = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}"
    reasons += "<think>\n{{ m.reasoning_content.strip() }}\n</think>\n{% endif %}{{ m.content }}"
    serve(server, reasons + "<|im_end|>\n{% endfor %}", "<think>", "</think>")
    hello = {"role": "user", "content": "Hi"}
    server.engine.reply = " a time</think>So"
    for begun in (
        {"reasoning_content": "Once upon", "content": None},
        {"reasoning": "Once upon"},
    ):
        messages = [hello, {"role": "assistant", **begun}]
        answer = await server.chat(messages=messages, continue_final_message=True)
        message = answer.json["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == (" a time", "So")
        assert prompt_of(server).endswith("assistant\n<think>\nOnce upon")
    # An empty content is one that has begun.
    server.engine.reply = "So"
    messages = [hello, {"role": "assistant", "reasoning": "Once", "content": ""}]
    answer = await server.chat(messages=messages, continue_final_message=True)
    assert answer.json["choices"][0]["message"]["content"] == "So"
    assert prompt_of(server).endswith("<think>\nOnce\n</think>\n")
    serve(server, f"{OPENS}{{# </think> #}}", "<think>", "</think>")
    messages = [hello, {"role": "assistant", "reasoning": "Once"}]
    answer = await server.chat(messages=messages, continue_final_message=True)
    assert (answer.status, answer.error["param"]) == (400, "messages")


async def test_tokenize_knows_the_prompt_of_a_chat(server):
    serve(server, f"{WITH_TOOLS}{{# {MARKS['hermes']} #}}{{{{ enable_thinking }}}}")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}]
    for fields in (
        {"tools": TOOLS, "reasoning_effort": "high"},
        {"continue_final_message": True},
    ):
        await server.chat(messages=messages, **fields)
        answer = await server.post("/tokenize", {"messages": messages, **fields})
        assert answer.json["tokens"] == server.engine.calls[-1].prompt
    answer = await server.post("/tokenize", {"messages": messages, "tools": 7})
    assert (answer.status, answer.error["param"]) == (400, "tools")
