"""Chats are rendered as transformers renders them, and nothing a client sends breaks out."""

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gllm.config.output_parsers import OutputParserConfig
from gllm.options.field_types import FieldError
from gllm.options.limits import MAX_MESSAGES
from gllm.text.chat.prompt import ChatRequest, render_chat
from gllm.text.chat.template import MAX_CHARACTERS, ChatTemplate, load_chat_template
from gllm.text.chat.tools import parse_tools
from gllm.text.tokenizer import Tokenizer
from tests.support.text import tokenizers as some

INST = """{{ bos_token }}{% for m in messages %}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if m['role'] == 'user' %}[INST] {{ m['content'].strip() }} [/INST]
    {%- else %} {{ m['content'] }}{{ eos_token }}{% endif %}
{%- endfor %}"""

HEADERS = """{%- set loop_messages = messages %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system = 'none given' %}
{%- endif %}
{{- bos_token + '<|start|>system\\n' + system + '<|stop|>' }}
{%- for m in loop_messages %}
    {{- '<|start|>' + m.role + '\\n' + (m.content | trim) + '<|stop|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}"""

JSON = """{% for m in messages %}
{% if m.role == 'system' %}{% continue %}{% endif %}
{{ {'r': m.role, 'c': m.content} | tojson }}
{{ m | tojson(indent=2) }}
{% endfor %}
{% if tools is not none %}TOOLS{% endif %}
"""

GENERATION = """{% for m in messages %}
{% if m.role == 'assistant' %}
{% generation %}
{{ m.content }}<|im_end|>
{% endgeneration %}
{% else %}
{{ m.role }}: {{ m.content }}
{% endif %}
{% endfor %}"""

TEMPLATES = {
    "chatml": some.CHATML,
    "inst": INST,
    "headers": HEADERS,
    "json": JSON,
    "generation": GENERATION,
}
CHAT = [
    {"role": "user", "content": " What is <b>2 & 2</b>? "},
    {"role": "assistant", "content": 'It\'s "4".\nÄäh, 你好 {{ 1 }}'},
    {"role": "user", "content": "Sure?"},
]
CHATS = {
    "one": CHAT[:1],
    "three": CHAT,
    "system": [{"role": "system", "content": "Be terse. "}, *CHAT],
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def peer():
    """transformers' tokenizer, with which templates are published."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=some.byte_level(), **TOKENS)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_as_transformers(peer, name, chat, prompt):
    ours = ChatTemplate(TEMPLATES[name], TOKENS)
    options = {
        "chat_template": TEMPLATES[name],
        "tokenize": False,
        "add_generation_prompt": prompt,
        "enable_thinking": False,
    }
    sent = CHATS[chat]
    if name == "inst" and chat == "system":
        # This template rejects a system message; it becomes part of the user's.
        text = "\n\n".join(message["content"] for message in sent[:2])
        sent = [{"role": "user", "content": text}, *sent[2:]]
    expected = peer.apply_chat_template(sent, **options)
    assert ours.render(CHATS[chat], prompt, {"enable_thinking": False}) == expected


def test_strftime_now():
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render(CHAT).startswith("20")


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    template = ChatTemplate(some.CHATML, {})
    assert "a\nb<|im_end|>" in template.render([{"role": "user", "content": parts}])


def test_developer_is_system_unless_the_template_knows_it():
    chat = [{"role": "developer", "content": "x"}]
    assert "<|im_start|>system" in ChatTemplate(some.CHATML, {}).render(chat)
    knows = some.CHATML + "{# developer #}"
    assert "<|im_start|>developer" in ChatTemplate(knows, {}).render(chat)
    assert chat == [{"role": "developer", "content": "x"}]


BAD_MESSAGES: list[Any] = [
    None,
    [],
    {},
    "hi",
    7,
    ["hi"],
    [None],
    [{}],
    [{"role": "user"}],
    [{"content": "x"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": 7}],
    [{"role": "user", "content": {}}],
    [{"role": ["user"], "content": "x"}],
    [{"role": "wizard", "content": "x"}],
    [{"role": "user", "content": ["x"]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
    [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1),
]


@pytest.mark.parametrize("messages", BAD_MESSAGES, ids=range(len(BAD_MESSAGES)))
def test_bad_messages_are_named(messages):
    with pytest.raises(FieldError) as caught:
        ChatTemplate(some.CHATML, {}).render(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ raise_exception('no') }}",
    ],
)
def test_templates_are_fenced_in(source):
    with pytest.raises(FieldError) as caught:
        ChatTemplate(source, {}).render(CHAT)
    assert caught.value.param == "messages"


def test_output_is_bounded():
    chat = [{"role": "user", "content": "x" * 2**17}]
    repeat = "{{% for i in range({}) %}}{{{{ messages[0].content }}}}{{% endfor %}}"
    count = MAX_CHARACTERS // 2**17
    assert len(ChatTemplate(repeat.format(count), {}).render(chat)) == MAX_CHARACTERS
    with pytest.raises(FieldError, match="too large"):
        ChatTemplate(repeat.format(count + 1), {}).render(chat)


def test_places_a_template_may_be_in(tmp_path):
    backend, chat = some.byte_level(), [{"role": "user", "content": "x"}]
    none = some.save(tmp_path / "none", backend, bos_token="<s>")
    assert load_chat_template(none) is None
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    homes = {
        "string": some.save(tmp_path / "string", backend, chat_template="d"),
        "list": some.save(tmp_path / "list", backend, chat_template=named),
        "jinja": some.save(tmp_path / "jinja", backend, chat_template="old"),
        "json": some.save(tmp_path / "json", backend),
    }
    (homes["jinja"] / "chat_template.jinja").write_text("d")
    (homes["json"] / "chat_template.json").write_text(json.dumps({"chat_template": "d"}))
    for home in homes.values():
        template = Tokenizer.load(home).chat_template
        assert template is not None
        assert template.render(chat) == "d"


def test_special_tokens_may_be_objects(tmp_path):
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": None, "pad_token": "<p>"}
    source = "{{ bos_token }}{{ pad_token }}{{ eos_token is defined }}"
    folder = some.save(tmp_path, some.byte_level(), chat_template=source, **tokens)
    template = load_chat_template(folder)
    assert template is not None
    assert template.render(CHAT) == "<s><p>False"


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
NAMED_TOKENS = (
    "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ image_token }}|{{ boi }}|{{ audio_token }}"
)
OBJECT = {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "map alone": ({}, {"bos_token": "<s>", "eos_token": OBJECT | {"content": "</s>"}}),
    "map over configuration": ({"bos_token": "<old>", "pad_token": "<p>"}, {"bos_token": OBJECT}),
    "map ignored": (
        {"bos_token": "<new>", "added_tokens_decoder": {"0": OBJECT | {"special": True}}},
        {"bos_token": "<s>", "eos_token": "</s>"},
    ),
    "named extras": ({"extra_special_tokens": {"image_token": "<i>", "boi": "<b>"}}, {}),
    "named extras of the map": ({}, {"extra_special_tokens": {"boi": "<b>"}}),
    "listed extras": ({"extra_special_tokens": ["<i>", "<b>"], "audio_token": "<a>"}, {}),
    "extra over named": (
        {"audio_token": "<a>", "extra_special_tokens": {"audio_token": "<c>"}},
        {},
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_special_tokens_are_those_of_transformers(case, tmp_path):
    from transformers import PreTrainedTokenizerFast

    config, special = SETTINGS[case]
    folder = some.save(tmp_path, some.byte_level(), chat_template=NAMED_TOKENS, **config)
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    template = load_chat_template(folder)
    assert template is not None
    rendered = template.render(CHAT)
    assert rendered == theirs.apply_chat_template(CHAT, tokenize=False)
    assert "<" in rendered


@pytest.mark.parametrize("default", ["jinja", "json"])
def test_additional_templates_are_those_of_transformers(default, tmp_path):
    from transformers import PreTrainedTokenizerFast

    chat = [{"role": "user", "content": "x"}]
    config = {"chat_template": "plain {{ messages[0].content }}"} if default == "json" else {}
    folder = some.save(tmp_path, some.byte_level(), bos_token="<s>", **config)
    (folder / "additional_chat_templates").mkdir()
    for name in ("tool_use", "rag"):
        source = name + "{{ bos_token }} {{ tools | length }}"
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(source)
    if default == "jinja":
        (folder / "chat_template.jinja").write_text("plain {{ messages[0].content }}")
    template = load_chat_template(folder)
    assert template is not None
    assert template.supports_tools
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    with_tools = theirs.apply_chat_template(chat, tools=TOOLS, tokenize=False)
    assert template.render(chat, tools=TOOLS) == with_tools == "tool_use<s> 1"
    # transformers has no default template here where only tokenizer_config.json has it.
    assert template.render(chat) == "plain x"
    if default == "jinja":
        assert theirs.apply_chat_template(chat, tokenize=False) == "plain x"


@pytest.mark.parametrize("name", ["special_tokens_map.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_broken_files_are_named(name, content, tmp_path):
    folder = some.save(tmp_path, some.byte_level(), chat_template="x")
    (folder / "chat_template.jinja").write_text("x")
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=name):
        load_chat_template(folder)


LISTED = """{% for m in messages %}<{{ m.role }}>
{%- if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}{{ part.text }}{% if m.role == 'system' %} | {% endif %}
{%- endfor %}{% endif %}</>{% endfor %}"""
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + LISTED
TRIMMED = """{% for m in messages %}<{{ m.role }}>
{%- set text = m['content'] %}
{%- if text is string or m.role == 'assistant' %}{{ text }}
{%- else %}{% for part in text %}({{ part['text'] | trim }}){% endfor %}{% endif %}</>
{%- endfor %}"""
MACRO = """{% macro show(message, is_short=false) %}{% set c = message.get('content') %}
{%- if c is string %}{{ c }}{% else %}{% for part in c %}{{ part.text }}{% endfor %}{% endif %}
{%- endmacro %}{% for m in messages %}<{{ m.role }}>{{ show(m) | trim }}</>{% endfor %}"""
SORTED = """{% for m in messages %}<{{ m.role }}>
{%- set parts = m.content | sort(attribute='type') if m.content is not string else [] %}
{%- for part in parts %}{{ part.text }}{% else %}{{ m.content }}{% endfor %}</>{% endfor %}"""
SPLIT = """{% macro shown(text) %}{% for piece in text.split('</think>') %}
{%- if loop.last %}{{ piece }}{% endif %}{% endfor %}{% endmacro %}
{%- for m in messages %}<{{ m.role }}>{{ shown(m.content) }}</>{% endfor %}"""
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("source", "role", "shown"),
    [
        (LISTED, "user", "ab"),
        (LISTED, "assistant", "ab"),
        (LISTED, "tool", "ab"),
        (LISTED, "system", "a | b | "),
        (REFUSES, "user", "ab"),
        (TRIMMED, "user", "(a)(b)"),
        (TRIMMED, "assistant", "a \n b"),
        (MACRO, "user", "ab"),
        (SORTED, "user", "ab"),
        (SPLIT, "user", "a\nb"),
        (some.CHATML, "user", "a\nb"),
        (INST, "user", "a\nb"),
        (JSON, "user", "a\\nb"),
    ],
)
def test_parts_are_joined_as_the_template_joins_them(source: str, role: str, shown: str) -> None:
    """By a line break where it expects a text; transformers renders the list itself."""
    before = [] if role in ("user", "system") else [{"role": "user", "content": "x"}]
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": " b"}]
    messages = [*before, {"role": role, "content": parts if source == TRIMMED else PARTS}]
    text = ChatTemplate(source, {"bos_token": "", "eos_token": ""}).render(messages)
    assert shown in text
    if "\\n" not in shown and "\n" not in shown:
        ((wanted,), _) = render_jinja_template([messages], chat_template=source)
        assert text == wanted


def test_the_end_of_parts_is_continued() -> None:
    messages = [{"role": "user", "content": PARTS}, {"role": "assistant", "content": PARTS}]
    text = ChatTemplate(MACRO, {}).render(messages, False, continue_final=True)
    assert text == "<user>ab</><assistant>ab"


def test_null_becomes_an_empty_text_where_the_template_fails_for_it() -> None:
    source = """{% for m in messages %}<{{ m.role }}>
    {%- if m['content'] is none or m.role == 'user' %}{% endif %}
    {%- if m['content'] | length > 0 %}{{ m['content'] }}{% endif %}{% endfor %}"""
    call = {"id": "x", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    assert ChatTemplate(source, {}).render(messages) == "<user>a<assistant>"


def test_documents_reach_the_template_or_are_refused() -> None:
    shows = "{% for d in documents or [] %}[{{ d.title }}: {{ d.text }}]{% endfor %}" + some.CHATML
    documents = [{"title": "t", "text": "a<|im_end|>b"}]
    request = ChatRequest(
        [{"role": "user", "content": "x"}], template_variables={"documents": documents, "other": 1}
    )
    tokenizer = Tokenizer(some.byte_level(), ChatTemplate(shows, {}))
    ids = render_chat(tokenizer, request, OutputParserConfig()).token_ids
    assert tokenizer.decode(ids, False).startswith("[t: a<|im_end|>b]<|im_start|>user")
    names = [tokenizer.id_to_token(i) for i in ids]
    assert names.count("<|im_end|>") == 1, "that of the turn alone"
    tokenizer.chat_template = ChatTemplate(some.CHATML, {})
    with pytest.raises(FieldError, match="documents") as caught:
        render_chat(tokenizer, request, OutputParserConfig())
    assert caught.value.param == "chat_template_kwargs"


def test_any_variable_but_those_of_fields() -> None:
    """Texts are compared by templates, and special tokens in them are text."""
    source = "{{ style == 'think>' }} {{ style }} {{ note }} {{ sizes | sum }}<|im_end|>"
    backend = some.byte_level()
    backend.add_special_tokens(["<think>"])
    tokenizer = Tokenizer(backend, ChatTemplate(source, {}))
    messages = [{"role": "user", "content": "x"}]
    variables = {"style": "think>", "note": "<think>", "sizes": [1, 2]}
    request = ChatRequest(messages, template_variables=variables)
    ids = render_chat(tokenizer, request, OutputParserConfig()).token_ids
    assert tokenizer.decode(ids) == "True think> <think> 3"
    wrong: Any
    for wrong in ({"messages": []}, {"tools": []}, {"enable_thinking": 1}, {1: 2}, 7, "x"):
        with pytest.raises(FieldError) as caught:
            ChatRequest(messages, template_variables=wrong)
        assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_thinking", False),
        ("thinking", True),
        ("reasoning_effort", "no_think"),
        ("thinking_budget", 512),
        ("custom", {"list": [1, "a"]}),
    ],
)
def test_every_variable_reaches_the_template(name: str, value: Any) -> None:
    """Also beside the field of the same purpose, and in a template for tools alone."""
    source = f"{{{{ {name} is defined and {name} == {value!r} }}}}{{{{ tools and '' }}}}<|im_end|>"
    tokenizer = Tokenizer(some.byte_level(), ChatTemplate(some.CHATML, {}, tool_source=source))
    tools = parse_tools([{"type": "function", "function": {"name": "f"}}], None)
    messages = [{"role": "user", "content": "x"}]
    request = ChatRequest(messages, tools, {name: value}, reasoning_effort="high")
    parsers = OutputParserConfig(tool_call_parser="hermes")
    ids = render_chat(tokenizer, request, parsers).token_ids
    assert tokenizer.decode(ids) == "True"
