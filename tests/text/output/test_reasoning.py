"""Reasoning is split off where it is, counted, and found by the template."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.text.output.events import AssistantMessage
from gllm.text.output.parser import OutputFormat, OutputParser
from gllm.text.output.reasoning import ReasoningTokenCounter
from gllm.text.output.registry import REASONING_TAGS, select_reasoning_tags, select_tool_call_format
from tests.support.examples import num_examples

CASES = [
    ("<think>\nhm, yes\n</think>\n\nHello.\n", False, "hm, yes", "Hello.\n"),
    ("\n<think>a</think>b", False, "a", "b"),
    ("hm\n</think>Hello", True, "hm", "Hello"),
    ("<think>hm\n</think>Hello", True, "hm", "Hello"),
    ("<think>\n\n</think>\n\nHello", False, "", "Hello"),
    ("<think>never ends \n", False, "never ends", ""),
    ("never ends", True, "never ends", ""),
    ("Hello <think>no</think>", False, "", "Hello <think>no</think>"),
    ("  Hello </think>", False, "", "  Hello </think>"),
    ("<think", False, "", "<think"),
    ("<thinking>x", False, "", "<thinking>x"),
    ("", False, "", ""),
    ("", True, "", ""),
    (" \n", False, "", " \n"),
    ("a</think>b</think>c", True, "a", "b</think>c"),
    ("a < b </thin </think>c", True, "a < b </thin", "c"),
]


def read(text, within, name="think"):
    parser, message = OutputParser(OutputFormat(REASONING_TAGS[name], within)), AssistantMessage()
    for char in text:
        message.apply(parser.push(char))
    message.apply(parser.finish())
    return message.reasoning, message.content


@pytest.mark.parametrize(("text", "within", "reasoning", "content"), CASES)
def test_split(text, within, reasoning, content):
    assert read(text, within) == (reasoning, content)
    for name, tags in REASONING_TAGS.items():
        other = text.replace("<think>", tags.opening).replace("</think>", tags.closing)
        shown = content.replace("<think>", tags.opening).replace("</think>", tags.closing)
        assert read(other, within, name) == (reasoning, shown)


TAGGED_ANSWERS = [
    ("<think>\nhm\n</think>\n<answer>\nHello \n</answer>", "hm", "Hello"),
    ("<think>\n\n</think>\n<answer>\nHello\n</answer>\n", "", "Hello\n"),
    ("<think>hm</think>Hello</answer>", "hm", "Hello</answer>"),
    ("<think>hm</think><answer>a < b </ans \n", "hm", "a < b </ans \n"),
    ("<answer>Hello</answer>", "", "<answer>Hello</answer>"),
]


@pytest.mark.parametrize(("text", "reasoning", "content"), TAGGED_ANSWERS)
def test_tags_around_the_answer_are_no_content(text, reasoning, content):
    assert read(text, False, "hunyuan_a13b") == (reasoning, content)
    other = text.replace("answer>", "response>")
    assert read(other, False, "granite") == (reasoning, content.replace("answer>", "response>"))


@settings(max_examples=num_examples(100, 5000), deadline=None)
@given(
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "<", "think", ">", " ", "a"])),
    within=st.booleans(),
)
def test_no_tag_is_shown_as_reasoning_and_nothing_else_is_lost(pieces, within):
    text = "".join(pieces)
    reasoning, content = read(text, within)
    assert "</think>" not in reasoning
    assert (reasoning + content).count("a") == text.count("a")
    if not within and not text.lstrip().startswith("<think>"):
        assert (reasoning, content) == ("", text)


OPEN, CLOSE, BLANK = 90, 91, 0
COUNTS = [
    ([OPEN, 1, 2, CLOSE, 3, 4], False, 4),
    ([1, 2, CLOSE, 3], True, 3),
    ([1, 2], True, 2),
    ([BLANK, OPEN, 1, CLOSE, OPEN, 2], False, 3),
    ([1, OPEN, 2, CLOSE], False, 0),
    ([CLOSE, 1], True, 1),
    ([], True, 0),
]


@pytest.mark.parametrize(("tokens", "within", "count"), COUNTS)
def test_tokens_are_counted(tokens, within, count):
    counters = [
        ReasoningTokenCounter(OPEN, CLOSE, within, lambda token: token == BLANK) for _ in "ab"
    ]
    counters[0].add(tokens)
    for token in tokens:
        counters[1].add([token])
    assert [counter.num_tokens for counter in counters] == [count, count]


def test_where_a_prompt_leaves_reasoning():
    tags = REASONING_TAGS["think"]
    assert tags.are_opened_by("<|Assistant|><think>\n")
    assert not tags.are_opened_by("<|Assistant|><think>\n\n</think>\n\n")
    assert not tags.are_opened_by("what is <think>?<|Assistant|>")
    assert tags.are_open_in("<think>so far")
    assert not tags.are_open_in("<think>done</think> so far")
    assert not tags.are_open_in("so far")


SHOWN = [
    ('<tool_call>\n{"name": .., "arguments": ..}\n</tool_call>', "hermes"),
    ("<tool_call><function=..><parameter=..>", "qwen3_coder"),
    ("<tool_call>{name}<arg_key>{k}</arg_key>", "glm45"),
    ("{{ '<|python_tag|>' }}", "llama3"),
    ('{"name": function name, "parameters": dictionary of ..}', "llama3"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|observation|>", "glm4"),
    ("<|observation|><tool_call><arg_key>", "glm45"),
    (r'"<tool_call>\n{\"name\": <name>, \"arguments\": <object>}"', "hermes"),
    ("{%- set dsml_token = '｜DSML｜' -%}", "deepseek_v32"),
    ("<|tool_calls_section_begin|><|tool_call_argument_begin|>", "kimi_k2"),
    ("{%- set begin = '<minimax:tool_call>' -%}<parameter name=", "minimax_m2"),
    ("<seed:tool_call><function=f><parameter=k>", "seed_oss"),
    ("{{- '<|tool_call>call:' + name + '{' -}}", "gemma4"),
    ('{{- "<|tool_call_start|>[" -}}', "lfm2"),
    ("List of tools: <|tool_list_start|>[", "lfm2"),
    ("'<TOOLCALL>['", "nemotron"),
    ("{% set tool_calls_token = '<|tools_prefix|>' %}", "apertus"),
    ("<|START_ACTION|>[\n{%- for tc in message.tool_calls %}", "cohere"),
    ('<tool_call></tool_call>: <tool_calls>[{"name": .., "arguments": ..}]', "hunyuan_a13b"),
    ("respond only with <|tool_call|> followed by a JSON list", "granite"),
    ("'<tool_sep{}>'.format(x) '<arg_key{}>'.format(x)", "hy_v3"),
]


@pytest.mark.parametrize(("template", "name"), SHOWN)
def test_families_are_known_by_the_template(template, name):
    found = select_tool_call_format("auto", template, "qwen2")
    assert found is not None
    assert found.name == name


def test_families_are_known_by_type_or_named():
    assert select_tool_call_format("auto", "{{ tools }}") is None
    found = select_tool_call_format("auto", "{{ tools }}", "qwen3_moe")
    assert found is not None
    assert found.name == "hermes"
    named = select_tool_call_format("llama3", "[TOOL_CALLS]")
    assert named is not None
    assert named.name == "llama3"
    assert select_tool_call_format("none", "[TOOL_CALLS]") is None


def test_tags_are_known_by_the_template_or_named():
    assert select_reasoning_tags("auto", "{{ messages }}") is None
    assert select_reasoning_tags("auto", "content.split('</think>')") is REASONING_TAGS["think"]
    assert select_reasoning_tags("auto", "[THINK]") is REASONING_TAGS["mistral"]
    assert select_reasoning_tags("none", "<think>") is None
    assert select_reasoning_tags("mistral", "<think>") is REASONING_TAGS["mistral"]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<think>", "think"),
        ("[THINK]", "mistral"),
        ("'<|channel>thought\\n<channel|>'", "gemma4"),
        ("'<|channel|>analysis'", None),
        ("<seed:think>", "seed_oss"),
        ("<|inner_prefix|>", "apertus"),
        ("<|START_THINKING|>{{ message.thinking }}<|END_THINKING|>", "cohere"),
        ("'<think{}>'.format(HYTK)", "hy_v3"),
        ("<think></think> content.split('<answer>')[-1]", "hunyuan_a13b"),
        ("between <think></think> and <response></response>", "granite"),
        ("<think> '\\n<response>' '</response>'", "think"),
    ],
)
def test_tags_are_known_by_the_template(template, name):
    tags = select_reasoning_tags("auto", template)
    assert (tags and tags.name) == name
