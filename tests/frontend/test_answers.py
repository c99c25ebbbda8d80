"""Whole answers: shapes, fields, counts."""

import pytest

from gllm.text.tokenizer import Tokenizer
from tests.frontend.conftest import CHAT_PATH
from tests.support.text import tokenizers as some

LIMIT = 64


async def test_chat(server):
    answer = await server.chat()
    assert answer.status == 200
    body = answer.json
    reply = server.engine.tokenizer.encode(server.engine.reply)
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "fake/model"
    assert isinstance(body["created"], int)
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": server.engine.reply},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    prompt = len(server.engine.calls[0].prompt)
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": len(reply),
        "total_tokens": prompt + len(reply),
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def test_guesses_are_in_the_usage(server):
    """With OpenAI's names, as the sum of the choices."""
    server.engine.guesses = 5, 2
    expected = {"accepted_prediction_tokens": 15, "rejected_prediction_tokens": 6}
    usage = (await server.chat(n=3)).json["usage"]
    assert usage["completion_tokens_details"] == expected
    options = {"include_usage": True}
    events = await server.stream(CHAT_PATH, n=3, stream_options=options)
    assert events[-1]["usage"]["completion_tokens_details"] == expected


async def test_chat_prompt_is_the_rendered_template(server):
    await server.chat(cache_salt="tenant", priority=-3)
    call = server.engine.calls[0]
    tokenizer = server.engine.tokenizer
    assert tokenizer.decode(call.prompt, skip_special_tokens=False) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (call.cache_salt, call.priority) == ("tenant", -3)
    await server.chat(add_generation_prompt=False)
    text = tokenizer.decode(server.engine.calls[1].prompt, skip_special_tokens=False)
    assert text.endswith("<|im_end|>\n")


async def test_completion(server):
    body = (await server.complete(max_tokens=LIMIT)).json
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {
            "index": 0,
            "text": server.engine.reply,
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]


async def test_default_length_of_both(server):
    await server.complete()
    await server.chat()
    assert [call.params.max_tokens for call in server.engine.calls] == [16, None]


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("Hi", 1), (["Hi", "you"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2)],
)
async def test_prompts_and_choices(server, prompt, count):
    answer = await server.complete(prompt=prompt, n=3, max_tokens=2, return_token_ids=True)
    choices = answer.json["choices"]
    ids = server.engine.tokenizer.encode(server.engine.reply)[:2]
    assert [choice["index"] for choice in choices] == list(range(3 * count))
    assert all(choice["token_ids"] == ids for choice in choices)
    assert all(choice["finish_reason"] == "length" for choice in choices)
    usage = answer.json["usage"]
    assert usage["completion_tokens"] == 2 * 3 * count
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3 * count}
    asked = sorted(len(call.prompt) for call in server.engine.calls)
    assert usage["prompt_tokens"] == sum(asked)


async def test_stop_string_is_cut_and_told(server):
    choice = (await server.chat(stop=["how are", "zzz"])).json["choices"][0]
    assert choice["message"]["content"] == "Hello wörld 🎉, "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "how are")


async def test_sampling_reaches_the_engine(server):
    given = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": -(2**63),
        "stop": "zzz",
        "stop_token_ids": [4, 5],
        "min_tokens": 2,
        "ignore_eos": True,
        "n": 2,
    }
    assert (await server.chat(**given, max_tokens=5, max_completion_tokens=9)).status == 200
    params = server.engine.calls[0].params
    expected = {**given, "stop": ("zzz",), "stop_token_ids": (4, 5), "max_tokens": 9}
    assert {name: getattr(params, name) for name in expected} == expected


async def test_defaults_come_from_the_model(server):
    server.engine.defaults = {"temperature": 0.6, "top_k": 20}
    await server.chat()
    await server.chat(temperature=1.5, top_k=None)
    params = [call.params for call in server.engine.calls]
    assert [(p.temperature, p.top_k, p.top_p) for p in params] == [(0.6, 20, 1.0), (1.5, 20, 1.0)]


NEUTRAL = {
    "user": 7,
    "store": True,
    "metadata": {"a": [1]},
    "parallel_tool_calls": False,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "allowed_token_ids": None,
    "bad_words": [],
    "logprobs": None,
    "top_logprobs": None,
    "prompt_logprobs": None,
    "truncate_prompt_tokens": None,
    "echo": False,
    "use_beam_search": False,
    "best_of": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
    "include_stop_str_in_output": False,
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "structured_outputs": None,
    "stop": [],
    "seed": None,
    "n": None,
    "stream": None,
    "stream_options": None,
    "skip_special_tokens": True,
    "max_tokens": None,
    "model": "fake/model",
}


async def test_values_that_ask_nothing(server, caplog):
    for ask in (server.chat, server.complete):
        for name, value in NEUTRAL.items():
            assert (await ask(**{name: value})).status == 200, name
            assert not caplog.records, name


async def test_unknown_fields_are_warned_of_once(server, caplog):
    assert (await server.chat(wild=1, extra={"x": None})).status == 200
    assert len(caplog.records) == 1
    assert "wild" in caplog.text
    assert "extra" in caplog.text


async def test_request_ids(server):
    answer = await server.post(CHAT_PATH, {"messages": CHATS}, headers={"X-Request-Id": "a b\té-1"})
    assert answer.headers["X-Request-Id"] == "ab-1"
    assert answer.json["id"] == "chatcmpl-ab-1"
    answer = await server.chat(request_id="mine")
    assert answer.json["id"] == "chatcmpl-mine"
    assert len(answer.headers["X-Request-Id"]) == 32


CHATS = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


async def test_template_options(server):
    good = await server.chat(chat_template_kwargs={"enable_thinking": False})
    free = await server.chat(chat_template_kwargs={"any_variable": {"a": [1]}, "thinking": None})
    bad = await server.chat(chat_template_kwargs={"messages": []})
    assert good.status == free.status == 200
    assert (bad.status, bad.error["param"]) == (400, "chat_template_kwargs")


async def test_without_a_template_chat_is_refused(server):
    server.engine.tokenizer = Tokenizer(some.byte_level())
    answer = await server.chat()
    assert (answer.status, answer.error["param"]) == (400, "messages")
