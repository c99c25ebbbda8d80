"""Every family's calls are found in every cut, and whatever is no call is content."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gllm.text.output import families
from gllm.text.output.events import AssistantMessage, ToolCallStart, merge_events
from gllm.text.output.parser import OutputFormat, OutputParser
from gllm.text.output.registry import REASONING_TAGS, TOOL_CALL_FORMATS
from tests.support.examples import num_examples
from tests.support.text.tool_formats import (
    BEFORE,
    FIRST_ONLY,
    FORMATS,
    LITERALS,
    TAGGED,
    gemma4_quoted,
    lfm2_python,
)

TOOLS = {
    "f": {"properties": {"a": {"type": "string"}, "n": {"type": ["integer", "null"]}}},
    "get_weather": {"properties": {"unit": {"enum": ["c", "f"]}, "days": {"type": "array"}}},
    "ff": {},
}
NAMES = [name for name, _ in FORMATS]
IDS = [write.__name__ for _, write in FORMATS]


def test_every_family_has_a_row_and_a_name():
    assert set(NAMES) == TOOL_CALL_FORMATS.keys()
    assert all(form.name == name for name, form in TOOL_CALL_FORMATS.items())
    assert all(tags.name == name for name, tags in REASONING_TAGS.items())
    files = {path.stem for path in Path(families.__path__[0]).glob("[a-z]*.py")}
    assert files == {*TOOL_CALL_FORMATS, *REASONING_TAGS}


def events_of(form, pieces):
    parser = OutputParser(form)
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.finish()


def message_of(family, *pieces, tags=None, within=False):
    """All that the pieces say."""
    form = OutputFormat(REASONING_TAGS.get(tags), within, TOOL_CALL_FORMATS.get(family), TOOLS)
    message = AssistantMessage()
    message.apply(events_of(form, pieces))
    return message


def said(message):
    """A message without ids, arguments as values."""
    calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls.values()]
    return message.reasoning, message.content, calls


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("f", {"a": 'x "y"\n<z> ü', "n": 7}),
    ("get_weather", {"unit": "c", "days": [1, {}]}),
]


@pytest.mark.parametrize(("name", "write"), FORMATS, ids=IDS)
def test_calls_are_found_character_by_character(name, write):
    assert said(message_of(name, *write(CALLS))) == ("", "", CALLS)
    assert said(message_of(name, *write([("ff", {})]))) == ("", "", [("ff", {})])
    if name not in FIRST_ONLY:
        assert said(message_of(name, *f"{BEFORE}\n{write(CALLS)}\n")) == ("", BEFORE, CALLS)
    thought = f"<think>\nhm <tool\n</think>\n\n{write(CALLS)}"
    assert said(message_of(name, *thought, tags="think")) == ("hm <tool", "", CALLS)


@pytest.mark.parametrize(("name", "write"), FORMATS, ids=IDS)
def test_arguments_come_while_they_are_written(name, write):
    text = write([("f", {"a": "long " * 50})])
    parser = OutputParser(OutputFormat(None, False, TOOL_CALL_FORMATS[name], TOOLS))
    held = 0
    begun = done = False
    for char in text:
        events = parser.push(char)
        begun = begun or any(isinstance(event, ToolCallStart) for event in events)
        done = done or any('g "' in getattr(event, "text", "") for event in events)
        held = held + 1 if begun and not done and not events else 0
        if begun and "long" in "".join(getattr(event, "text", "") for event in events):
            done = True
        assert held < 80
    assert begun


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=4)


@pytest.mark.parametrize(
    ("name", "write"),
    [row for row in FORMATS if row[0] not in (*TAGGED, *LITERALS)],
    ids=lambda value: getattr(value, "__name__", value),
)
@settings(max_examples=num_examples(12, 500), deadline=None)
@given(calls=st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), OBJECTS), min_size=1, max_size=3))
def test_any_arguments_of_json_formats(name, write, calls):
    assert said(message_of(name, write(calls))) == ("", "", calls)


@pytest.mark.parametrize(("name", "write"), [("gemma4", gemma4_quoted), ("lfm2", lfm2_python)])
@settings(max_examples=num_examples(15, 1500), deadline=None)
@given(value=VALUES.filter(lambda value: '<|"|>' not in repr(value)))
def test_any_value_of_literal_formats(name, write, value):
    calls = [("ff", {"a": value, "b": value})]
    assert said(message_of(name, write(calls))) == ("", "", calls)


@pytest.mark.parametrize("name", TAGGED)
@settings(max_examples=num_examples(15, 1500), deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(
        lambda text: "</" not in text
    ),
    number=st.none() | st.integers(),
    days=st.lists(VALUES, max_size=3),
)
def test_any_arguments_of_tagged_formats(name, text, number, days):
    calls = [("f", {"a": text, "n": number}), ("get_weather", {"unit": "c", "days": days})]
    write = next(write for row, write in FORMATS if row == name)
    assert said(message_of(name, write(calls))) == ("", "", calls)


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<tool",
    "call>",
    "<",
    ">",
    "\n",
    " ",
    '{"name": "f", "arguments": ',
    '{"name": "f", "parameters": ',
    '{"a": 1}',
    "{}",
    "{",
    "}",
    '{"arguments": {"a": "x"}, "name": "ff"}',
    '"',
    "[",
    "]",
    ",",
    ":",
    ";",
    "\\",
    "f",
    "Hello",
    "<function=f>",
    "<parameter=a>",
    "<parameter=n>",
    "</parameter>",
    "</function>",
    "12",
    "<arg_key>",
    "a",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "f\n",
    "get_weather\n",
    "null",
    "[TOOL_CALLS]",
    "<|channel|>",
    "<|start|>",
    "<|message|>",
    "<|end|>",
    "analysis",
    " to=functions.f",
    "[ARGS]",
    "[CALL_ID]",
    "[THINK]",
    "[/THINK]",
    "<|python_tag|>",
    "true",
    "-1.5",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "```json",
    "```",
    "é",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "function",
    '{"x": "\\u00',
    "\x00",
    "'",
    "<｜DSML｜tool_calls>",
    '<｜DSML｜invoke name="f">',
    '<｜DSML｜parameter name="a" string="true">',
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>functions.f:0",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    '<invoke name="f">',
    '<parameter name="n">',
    "</invoke>",
    "<seed:tool_call>",
    "<|tool_call>",
    "call:f",
    "{a:",
    '<|"|>',
    "<tool_call|>",
    "<|tool_call_start|>[",
    "f(",
    "a=",
    ")",
    "<TOOLCALL>",
    "<tool_calls>",
    "</tool_calls>",
    "<|tool_call|>",
    "<tool_sep>",
    "<tool_call:opensource>",
    '<|tools_prefix|>[{"f": ',
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


def cut(text, cuts):
    """The text in pieces."""
    edges = sorted({0, *(min(at, len(text)) for at in cuts), len(text)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def bare(events):
    """Events without ids."""
    return [
        ToolCallStart(event.index, "", event.name) if isinstance(event, ToolCallStart) else event
        for event in merge_events(events)
    ]


@pytest.mark.parametrize("name", [*TOOL_CALL_FORMATS, None])
@settings(max_examples=num_examples(15, 1500), deadline=None)
@given(
    text=TEXTS,
    cuts=st.lists(st.integers(0, 120), max_size=12),
    tags=st.sampled_from([None, *REASONING_TAGS]),
    within=st.booleans(),
)
def test_cuts_do_not_matter(name, text, cuts, tags, within):
    form = OutputFormat(REASONING_TAGS.get(tags), within, TOOL_CALL_FORMATS.get(name), TOOLS)
    whole = bare(events_of(form, [text]))
    assert bare(events_of(form, cut(text, cuts))) == whole
    assert bare(events_of(form, text)) == whole


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
@settings(max_examples=num_examples(20, 2000), deadline=None)
@given(text=TEXTS)
@example(text='<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>')
def test_calls_are_valid_and_nothing_is_lost(name, text):
    message = message_of(name, text)
    for call in message.tool_calls.values():
        assert isinstance(json.loads(call.arguments), dict)
    if not message.tool_calls:
        assert message.content == text
    outside = "".join(call.name + call.arguments for call in message.tool_calls.values())
    assert all(char in message.content + outside for char in text if char in "é'-H")


BROKEN = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": oops}}\n</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "two words", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "never ends'),
    ("hermes", "a < b, <tool_ and </tool_call> alone"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nnever ends\n"),
    ("qwen3_coder", "<tool_call>\nno function"),
    ("glm45", "<tool_call>f is a tool</tool_call>"),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\nx</tool_call>"),
    ("glm4", "f is the function\nget_weather\n{oops}"),
    ("glm4", 'unknown\n{"a": 1}'),
    ("llama3", '{"name": "Otto", "parameters": {"kind": "fox"}}'),
    ("llama3", '{"answer": {"name": "f", "parameters": {}}}'),
    ("llama3", '<|python_tag|>search.call(query="x")'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {]'),
    ("mistral", "[TOOL_CALLS]f[ARGS]oops"),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\noops\n```",
    ),
    ("deepseek", "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>"),
    ("deepseek_v32", "<｜DSML｜function_calls>\nno call\n</｜DSML｜function_calls>"),
    (
        "deepseek_v32",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a">x',
    ),
    (
        "kimi_k2",
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>oops<|tool_call_end|>",
    ),
    ("kimi_k2", "<|tool_calls_section_begin|>functions.f:0<|tool_calls_section_end|>"),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">never ends'),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="two words">\n</invoke>'),
    ("seed_oss", "<seed:tool_call>\n<function=f>\n<parameter=a>never ends"),
    ("gemma4", '<|tool_call>call:f{a:<|"|>never ends'),
    ("gemma4", "<|tool_call>call:f{a:oops}<tool_call|>"),
    ("gemma4", "<|tool_call>f{a:1}<tool_call|>"),
    ("gemma4", "<|tool_call>call:f{a:[1,2}<tool_call|>"),
    ("lfm2", "<|tool_call_start|>[f(a=oops)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(a='never ends"),
    ("lfm2", "<|tool_call_start|>nothing<|tool_call_end|>"),
    ("apertus", "<|tools_prefix|>[{f: {}}]<|tools_suffix|>"),
    ("apertus", '<|tools_prefix|>[{"f": 1}]<|tools_suffix|>'),
    ("cohere", '<|START_ACTION|>[{"tool_call_id": "0", "parameters": {}}]<|END_ACTION|>'),
    ("nemotron", "<TOOLCALL>[]</TOOLCALL>"),
    ("hunyuan_a13b", '<tool_calls>[{"name": "f", "arguments": {]</tool_calls>'),
    ("granite", "<|tool_call|> [none]"),
    ("hy_v3", "<tool_calls>\n<tool_call>f is a tool</tool_call>\n</tool_calls>"),
    ("hy_v3", "<tool_call:opensource>f<tool_sep:opensource>\n<arg_key:opensource>a"),
    ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>oops<|call|>"),
    ("harmony", '<|channel|>commentary to=functions.f<|message|>{"a": "never ends'),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>"),
    ("harmony", "<|channel|>commentary to=functions.f<|call|>"),
    ("harmony", "<|channel|>final"),
    ("harmony", "a <|chan, <|end|> alone and to=functions.f"),
]


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_what_is_no_call_is_content(name, text):
    assert said(message_of(name, *text)) == ("", text, [])
    assert said(message_of(name, *f"{text} ")) == ("", f"{text} ", [])


LENIENT = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x"}</tool_call>', "", {"a": "x"}),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call>', "}", {"a": 1}),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", {"a": 1}),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", {}),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"\\u00e9": "\\ud83c\\udf89"}}</tool_call>',
        "",
        {"é": "🎉"},
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", {}),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}', "", {"a": "x\ny"}),
    ("qwen3_coder", "<function=f>\n<parameter=n>\n7\n</parameter>\n</function>", "", {"n": 7}),
    ("qwen3_coder", "<function=f><parameter=n>None</parameter></function>", "", {"n": None}),
    (
        "glm45",
        "<tool_call>f<arg_key>n</arg_key><arg_value>x</arg_value></tool_call>",
        "",
        {"n": "x"},
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdefghi"}]', "", {}),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": "x"}', "", {"a": "x"}),
    ("mistral", '[TOOL_CALLS]f{"a": "x"}', "", {"a": "x"}),
    ("harmony", '<|channel|>commentary to=f<|message|>{"a": "x"}<|end|>', "", {"a": "x"}),
    ("harmony", ' to=functions.f<|channel|>commentary code<|message|>{"n": 1}', "", {"n": 1}),
    ("harmony", '<|channel|>analysis to=functions.f<|message|> {"n": 1}\n', "", {"n": 1}),
    ("llama3", '{"type": "function", "name": "f", "parameters": {"n": 1}}', "", {"n": 1}),
    ("deepseek_v32", '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>', "", {}),
    (
        "deepseek_v32",
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="n" string="true">7</｜DSML｜parameter>'
        "</｜DSML｜invoke></｜DSML｜tool_calls>",
        "",
        {"n": "7"},
    ),
    (
        "kimi_k2",
        '<|tool_call_begin|>f:0 <|tool_call_argument_begin|> {"a": "x"}<|tool_call_end|>',
        "",
        {"a": "x"},
    ),
    ("minimax_m2", '<invoke name="f">\n<parameter name="n">7\n</invoke>', "", {"n": 7}),
    ("seed_oss", "<function=f><parameter=n>None</parameter></function>", "", {"n": None}),
    (
        "seed_oss",
        "<function=f><parameter=days>[1, {'a': True}]</parameter></function>",
        "",
        {"days": "[1, {'a': True}]"},
    ),
    ("gemma4", '<|tool_call> call: f{ a : "x" , n : 7, }', "", {"a": "x", "n": 7}),
    (
        "gemma4",
        "<|tool_call>call:f{days:[None,True,-1.5e3,{}]}",
        "",
        {"days": [None, True, -1500, {}]},
    ),
    ("lfm2", "<|tool_call_start|>f()<|tool_call_end|>", "", {}),
    ("lfm2", "<|tool_call_start|>[f( a = 'x\\n\\u00e9\\x41\\'' , )]", "", {"a": "x\né" + "A'"}),
    ("lfm2", "<|tool_call_start|>[f(a=(1, true, null))]", "", {"a": [1, True, None]}),
    ("lfm2", '<|tool_call_start|>[{"name": "f", "arguments": {}}]<|tool_call_end|>', "", {}),
    ("nemotron", '<TOOLCALL> {"name": "f", "arguments": {}} </TOOLCALL>', "", {}),
    (
        "granite",
        '<|tool_call|>\n[{"name": "f", "arguments": {"n": 1}}]<|/tool_call|>',
        "",
        {"n": 1},
    ),
    (
        "hy_v3",
        "<tool_call>f\n<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>",
        "",
        {"n": 1},
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "arguments"), LENIENT)
def test_what_is_nearly_a_call(name, text, content, arguments):
    assert said(message_of(name, *text)) == ("", content, [("f", arguments)])


def test_a_broken_call_behind_a_good_one():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": 1}'
    assert said(message_of("hermes", *text)) == ("", '\n<tool_call>{"name": 1}', [("f", {})])


def test_ids_fit_the_family():
    for name, write in FORMATS:
        ids = [call.id for call in message_of(name, write(CALLS)).tool_calls.values()]
        assert len(set(ids)) == 2
        fits = {"mistral": r"[A-Za-z0-9]{9}", "kimi_k2": r"functions\.\w+:[01]"}.get(
            name, r"call_[0-9a-f]{24}"
        )
        assert all(re.fullmatch(fits, one) for one in ids)


PIECES = [
    "<tool_call>",
    '<tool_call>{"name": "f", "arguments": {"a": "',
    "[TOOL_CALLS][",
    "<",
    " ",
    '<|tool_call>call:f{a:<|"|>',
    "<|tool_call_start|>[f(a='",
    '<invoke name="f">\n<parameter name="a">',
]


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
@pytest.mark.parametrize("piece", PIECES)
def test_nothing_is_read_twice(name, piece):
    """Were it, this would take minutes."""
    text = piece * 2000
    assert message_of(name, text).content == text
