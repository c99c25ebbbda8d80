"""Chats with tools come out of templates as transformers renders them, however they write calls."""

from typing import Any

import pytest

from gllm.options.field_types import FieldError
from gllm.text.chat.messages import normalize_messages
from gllm.text.chat.template import ChatTemplate, load_chat_template
from gllm.text.tokenizer import Tokenizer
from tests.support.text import tokenizers as some

AS_OBJECT = """{% if tools %}{% for t in tools %}{{ t | tojson }}
{% endfor %}{% endif %}
{% for m in messages %}
{{ m.role }}: {% if m.content %}{{ m.content }}{% endif %}
{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }} \
{%- for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}
{% if c.function.arguments is string %}TEXT{% endif %}
{% endfor %}
{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}
{% endfor %}"""

AS_TEXT = """{% for m in messages %}
{% if m['tool_calls'] %}
{% for c in m['tool_calls'] %}
{% if m['content'] is none %}{{ 'call ' + c['function']['arguments'] + '.' }}
{% else %}{{ m['content'] + ' call ' + c['function']['arguments'] ~ '.' }}{% endif %}
{% endfor %}
{% else %}
{{ m['role'] + ': ' + m['content'] }}
{% endif %}
{% endfor %}"""

TEXT = '{"b":  1, "a": [true, "é"]}'
VALUES = {"b": 1, "a": [True, "é"]}


def chat(arguments, content=None):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]


TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "description": "é"}}]


@pytest.mark.parametrize("content", [None, "", "See:"])
def test_as_transformers(content):
    from transformers import PreTrainedTokenizerFast

    peer = PreTrainedTokenizerFast(tokenizer_object=some.byte_level())
    for source, theirs in ((AS_OBJECT, VALUES), (AS_TEXT, TEXT)):
        if source == AS_TEXT and content is None:
            # Their newer releases drop what is null, older ones kept it.
            assert ChatTemplate(source, {}).render(chat(TEXT)).split("\n")[1] == f"call {TEXT}."
            continue
        expected = peer.apply_chat_template(
            chat(theirs, content), chat_template=source, tools=TOOLS, tokenize=False
        )
        ours = ChatTemplate(source, {})
        assert ours.render(chat(TEXT, content), False, tools=TOOLS) == expected
        if source == AS_OBJECT:
            assert ours.render(chat(VALUES, content), False, tools=TOOLS) == expected


def test_null_content_only_for_templates_that_know_it():
    words = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert ChatTemplate(words, {}).render(chat("{}")) == "[Hi][][7]"
    asks = words + "{{ messages[1].content is none }}"
    assert ChatTemplate(asks, {}).render(chat("{}")).endswith("True")
    other = words + "{% if messages[0].reasoning_content is not none %}{% endif %}"
    assert ChatTemplate(other, {}).render(chat("{}")) == "[Hi][][7]"


def test_what_null_stands_for():
    source = "{% for m in messages %}{{ 'tool_calls' in m }}{{ 'name' in m }}{% endfor %}"
    message = {"role": "user", "content": "x", "tool_calls": None, "name": None}
    assert ChatTemplate(source, {}).render([message]) == "FalseFalse"
    assert ChatTemplate(source, {}).render([{**message, "tool_calls": []}]) == "FalseFalse"


def test_reasoning_by_either_name():
    source = "{{ messages[0].reasoning_content }}|{{ messages[0].content }}"
    template = ChatTemplate(source, {})
    for name in ("reasoning", "reasoning_content"):
        assert template.render([{"role": "assistant", name: "hm", "content": "x"}]) == "hm|x"
        assert template.render([{"role": "assistant", name: "hm", "content": None}]) == "hm|"


def bad(**call):
    return [{"role": "assistant", "content": None, "tool_calls": [call]}]


FUNCTION = {"name": "f", "arguments": "{}"}
BAD = [
    bad(type="function"),
    bad(type="custom", function=FUNCTION),
    bad(function={"arguments": "{}"}),
    bad(function={"name": 7}),
    bad(id=7, function=FUNCTION),
    *[bad(function={"name": "f", "arguments": text}) for text in (7, [1])],
    [{"role": "assistant", "content": None, "tool_calls": {}}, {"role": "user", "content": None}],
    [{"role": "assistant", "content": None, "tool_calls": [{}] * 129}],
    [{"role": "assistant", "content": None, "tool_calls": ["x"]}],
    [{"role": "assistant", "content": None, "tool_calls": "x"}],
    [{"role": "user", "content": "x", "tool_calls": [{"function": FUNCTION}]}],
    [{"role": "assistant", "content": "x", "function_call": {"name": 7}}],
    [{"role": "assistant", "content": "x", "function_call": 7}],
    [{"role": "user", "content": "x", "function_call": FUNCTION}],
    [{"role": "assistant", "function_call": FUNCTION, "tool_calls": [{"function": FUNCTION}]}],
    [{"role": "function", "content": "x"}],
    [{"role": "function", "content": None, "name": "f"}],
    bad(type="custom", custom={"name": "f"}),
    bad(type="custom", custom={"input": "x"}),
    [{"role": "assistant", "content": "x", "reasoning": 7}],
    [{"role": "tool", "content": None, "tool_call_id": "x"}],
    [{"role": "tool", "content": "x", "tool_call_id": 7}],
    [{"role": "user", "content": "x", "name": 7}],
]


@pytest.mark.parametrize("messages", BAD, ids=range(len(BAD)))
def test_bad_messages(messages):
    with pytest.raises(FieldError) as caught:
        ChatTemplate(AS_OBJECT, {}).render(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("text", ["{", "[1]", "x", "7", "[" * 100_000, "9" * 5000, '{"a": 1,}'])
@pytest.mark.parametrize("source", [AS_OBJECT, AS_TEXT])
def test_arguments_that_are_no_object_are_text(text, source):
    prompt = ChatTemplate(source, {}).render(bad(function={"name": "f", "arguments": text}))
    assert text in prompt


def test_lone_surrogates_in_arguments_become_characters():
    arguments = r'{"a\ud800": ["\udc00x", "\ud83d\ude00"]}'
    call = {"name": "f", "arguments": arguments}
    prompt = ChatTemplate(AS_OBJECT, {}).render(bad(function=call))
    assert "\ufffdx" in prompt
    assert "😀" in prompt
    prompt.encode()


def test_an_assistant_may_have_said_nothing():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
    assert ChatTemplate(AS_OBJECT, {}).render(messages)


def test_empty_arguments_are_an_empty_object():
    empty: list[Any] = ["", None, "{}", {}]
    for given in empty:
        assert "call {}." in ChatTemplate(AS_TEXT, {}).render(chat(given))


def test_whether_there_is_a_place_for_tools(tmp_path):
    assert ChatTemplate(AS_OBJECT, {}).supports_tools
    assert not ChatTemplate(AS_TEXT, {}).supports_tools
    assert not ChatTemplate("{% set tools = [] %}{{ tools }}", {}).supports_tools
    assert ChatTemplate(
        "{% if not tools is defined %}{% set tools = 1 %}{% endif %}", {}
    ).supports_tools
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]
    (tmp_path / "config.json").write_text('{"model_type": "cohere"}')
    template = load_chat_template(some.save(tmp_path, some.byte_level(), chat_template=named))
    assert template is not None
    assert template.supports_tools
    assert template.model_type == "cohere"
    hello = [{"role": "user", "content": "x"}]
    assert template.render(hello) == "plain"
    assert "'name': 'f'" in template.render(hello, tools=TOOLS)


def test_a_template_in_place_of_the_models(tmp_path):
    (tmp_path / "other.jinja").write_text("{{ bos_token }}{{ tools }}")
    folder = some.save(tmp_path, some.byte_level(), chat_template="own", bos_token="<s>")
    hello = [{"role": "user", "content": "x"}]
    template = Tokenizer.load(folder, str(tmp_path / "other.jinja")).chat_template
    assert template is not None
    assert template.render(hello) == "<s>None"
    assert template.supports_tools
    with pytest.raises(OSError, match="nowhere"):
        Tokenizer.load(folder, str(tmp_path / "nowhere.jinja"))


def test_continued_messages():
    trims = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>\n{% endfor %}"
    hello: dict[str, Any] = {"role": "user", "content": "Hi"}
    messages: list[Any]
    for content in ("So it", "So it ", [{"type": "text", "text": "So it "}]):
        text = content if isinstance(content, str) else "So it "
        messages = [hello, {"role": "assistant", "content": content}]
        rendered = ChatTemplate(trims, {}).render(messages, False, continue_final=True)
        assert rendered == f"<user>Hi</s>\n<assistant>{text}"
    for messages in [[hello], chat("{}")[:2]]:
        with pytest.raises(FieldError) as caught:
            ChatTemplate(trims, {}).render(messages, False, continue_final=True)
        assert caught.value.param == "continue_final_message"
    last = [{"role": "assistant", "content": "x"}]
    with pytest.raises(FieldError) as caught:
        ChatTemplate("nothing", {}).render(last, False, continue_final=True)
    assert caught.value.param == "messages"


def test_the_older_function_call_is_a_tool_call():
    older = [
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "f", "arguments": '{"a": 1}'},
        },
        {"role": "function", "name": "f", "content": "7"},
    ]
    first, second = normalize_messages(older)
    (call,) = first["tool_calls"]
    assert "function_call" not in first
    assert (call["function"]["name"], dict(call["function"]["arguments"])) == ("f", {"a": 1})
    assert (second["role"], second["tool_call_id"], second["content"]) == ("tool", call["id"], "7")
    assert normalize_messages([older[1]])[0]["role"] == "tool"


def test_a_call_of_a_custom_tool_is_one_of_a_function():
    text = 'say "hi"\n'
    custom = {"id": "a", "type": "custom", "custom": {"name": "f", "input": text}}
    (message,) = normalize_messages([{"role": "assistant", "tool_calls": [custom]}])
    function = message["tool_calls"][0]["function"]
    assert (function["name"], dict(function["arguments"])) == ("f", {"input": text})
