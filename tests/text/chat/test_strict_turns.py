"""Templates that refuse some orders of roles: system messages of agents become part of turns."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gllm.options.field_types import FieldError
from gllm.text.chat.template import ChatTemplate
from tests.frontend.test_agents import MESSAGES_PATH, REQUESTS, messages, responses
from tests.support.examples import num_examples

TURNS = """{% set turns = messages[1:] if messages[0].role == 'system' else messages %}
{% for m in turns %}
{% if m.role == 'system' %}
{{ raise_exception('the system message has to be the first') }}
{% endif %}
{% endfor %}
{% set names = namespace(count=0) %}
{% for m in turns if m.role in ('user', 'assistant') and not m.tool_calls %}
{% if (m.role == 'user') != (names.count % 2 == 0) %}
{{ raise_exception('roles have to alternate') }}
{% endif %}
{% set names.count = names.count + 1 %}
{% endfor %}"""
WORDS = """{% for m in messages %}<{{ m.role }}>{{ m.content }}
{% for c in m.tool_calls %}[{{ c.function.name }}]{% endfor %}
{% endfor %}{# tools #}{{ tools }}"""
NO_SYSTEM = """{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"""
STRICT = ChatTemplate(TURNS + WORDS, {})
STRICTER = ChatTemplate(NO_SYSTEM + TURNS + WORDS, {})


def chat(*turns: str) -> list[dict[str, Any]]:
    """Return messages of `role text` each; a call is `call NAME`."""
    made: list[dict[str, Any]] = []
    for turn in turns:
        role, _, text = turn.partition(" ")
        if role == "call":
            call = {"id": "x", "function": {"name": text, "arguments": "{}"}}
            made.append({"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            made.append({"role": role, "content": text})
    return made


def shown(template: ChatTemplate, *turns: str) -> str:
    return "".join(template.render(chat(*turns)).split("\n")).removesuffix("None")


def test_system_messages_in_the_middle_join_the_neighboring_turn():
    assert shown(STRICT, "user a", "system s", "assistant b", "user c") == (
        "<user>as<assistant>b<user>c"
    )
    assert shown(STRICT, "system r", "user a", "assistant b", "developer s", "user c") == (
        "<system>r<user>a<assistant>b<user>sc"
    )
    assert shown(STRICT, "system r", "developer s", "user a", "user b") == "<system>rs<user>ab"
    assert shown(STRICTER, "system r", "user a", "system s") == "<user>ras"


def test_results_of_tools_take_the_texts_behind_them():
    assert shown(STRICT, "user a", "call f", "tool r", "system s", "user b") == (
        "<user>a<assistant>[f]<tool>rsb"
    )


def test_a_chat_that_is_accepted_stays_as_it_is():
    accepts = ChatTemplate(WORDS, {})
    turns = ("user a", "system s", "user b", "assistant c", "system t")
    assert shown(accepts, *turns) == "<user>a<system>s<user>b<assistant>c<system>t"


def test_the_error_is_that_of_the_chat_as_it_was_sent():
    with pytest.raises(FieldError, match="the system message has to be the first"):
        STRICT.render(chat("assistant a", "system s", "user b"))
    never = ChatTemplate("{{ raise_exception('never') }}", {})
    with pytest.raises(FieldError, match="never"):
        never.render(chat("user a", "system s"))


@given(st.lists(st.sampled_from(["system", "developer", "user", "assistant"]), max_size=12))
@example(["system", "developer", "user", "system", "assistant", "assistant", "system"])
@settings(max_examples=num_examples(50, 5000))
def test_no_text_is_lost(roles):
    turns = [f"{role} {number:02}" for number, role in enumerate(["user", *roles])]
    for template in (STRICT, STRICTER):
        text = shown(template, *turns)
        assert "".join(c for c in text if c.isdigit()) == "".join(t[-2:] for t in turns)


@pytest.mark.parametrize("template", [STRICT, STRICTER], ids=["strict", "stricter"])
@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_recorded_requests_of_agents(template, number):
    body = REQUESTS[number]["body"]
    convert = messages if REQUESTS[number]["path"] == MESSAGES_PATH else responses
    sent = convert(**body)[0]["messages"]
    assert {"system", "developer"} & {message["role"] for message in sent}
    text = template.render(sent)
    for message in sent:
        assert (message["content"] or "") in text


def test_a_continued_message_stays_the_last():
    turns = chat("user a", "system s", "assistant b", "assistant c")
    text = STRICT.render(turns, add_generation_prompt=False, continue_final=True)
    assert text.endswith("b\n\nc")
