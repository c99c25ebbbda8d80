"""Outputs of gpt-oss: messages in channels become reasoning, content and calls in every cut."""

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken

from gllm.config.output_parsers import OutputParserConfig
from gllm.config.sampling import StructuredOutput
from gllm.options.field_types import FieldError
from gllm.text.chat.output_grammar import constrain_output
from gllm.text.chat.output_parser import create_reasoning_counter_factory
from gllm.text.chat.prompt import ChatRequest, render_chat
from gllm.text.chat.template import ChatTemplate
from gllm.text.chat.tools import ToolOptions, parse_tools
from gllm.text.output.events import AssistantMessage
from gllm.text.output.families.harmony import FORMAT
from gllm.text.output.parser import OutputFormat, OutputParser
from gllm.text.output.registry import REASONING_TAGS
from gllm.text.tokenizer import Tokenizer
from tests.support.text import tokenizers as some
from tests.support.text.judge import Judge

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
CALLED, NO = [("f", '{"a": 1}')], [("f", "{}")]
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (f"{ANALYSIS}Hm, yes.{NEXT}{FINAL}Hello.<|return|>", "Hm, yes.", "Hello.", []),
    (f"{ANALYSIS}Hm.{NEXT}{CALL}<|call|>", "Hm.", "", CALLED),
    (f"{ANALYSIS}Hm.{NEXT} to=functions.f<|channel|>analysis code<|message|>{{}}", "Hm.", "", NO),
    (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", "a\n\nb", "c", []),
    (f"{ANALYSIS}{NEXT}{ANALYSIS}b\n{NEXT}{FINAL}", "b", "", []),
    (f"<|channel|>commentary<|message|>I look.\n{NEXT}{CALL}", "", "I look.", CALLED),
    (f"<|channel|>commentary<|message|>a{NEXT}{FINAL}b", "", "a\n\nb", []),
    (f"{FINAL}Hello. \n", "", "Hello. \n", []),
    ("Hello <|other|>.\n", "", "Hello <|other|>.\n", []),
    (f"{ANALYSIS}never ends <|en", "never ends <|en", "", []),
    (f"{ANALYSIS}Hm.<|start|>assistant{FINAL}Hello", "Hm.", "Hello", []),
    (f"{ANALYSIS}Hm.<|end|>\n<|start|>assistant<|channel|>final <|message|>a<b", "Hm.", "a<b", []),
    ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "print(1)", "", []),
    ("<|channel|>commentary to=browser.open<|message|>{}<|call|>", "", "{}", []),
    (f"{CALL}<|call|><|start|>assistant{FINAL}So.", "", "So.", CALLED),
]


def parsed(output_format: OutputFormat, text: str) -> tuple[str, str, list[tuple[str, str]]]:
    parser, message = OutputParser(output_format), AssistantMessage()
    for char in text:
        message.apply(parser.push(char))
    message.apply(parser.finish())
    calls = [(call.name, call.arguments) for call in message.tool_calls.values()]
    return message.reasoning, message.content, calls


TAGS = REASONING_TAGS["harmony"]
WITH_TOOLS = OutputFormat(TAGS, False, FORMAT, {"f": {}})


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), CASES)
def test_channels_are_separated_character_by_character(
    text: str, reasoning: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert parsed(WITH_TOOLS, text) == (reasoning, content, calls)


def test_reasoning_that_a_prompt_has_begun() -> None:
    form = replace(WITH_TOOLS, starts_in_reasoning=True)
    assert parsed(form, f", yes.{NEXT}{FINAL}Hello") == (", yes.", "Hello", [])
    assert parsed(form, f"{NEXT}{CALL}") == ("", "", CALLED)


def test_without_tools_nothing_is_a_call() -> None:
    form = OutputFormat(TAGS, False, FORMAT, only_listed_tools=True)
    assert parsed(form, f"{ANALYSIS}Hm.{NEXT}{FINAL}So") == ("Hm.", "So", [])
    assert parsed(form, f"{ANALYSIS}Hm.{NEXT}{CALL}")[1] == f"<|start|>assistant{CALL}"


def test_reasoning_is_content_for_the_parser_none() -> None:
    form = OutputFormat(None, False, FORMAT, {"f": {}})
    assert parsed(form, f"{ANALYSIS}Hm.{NEXT}{FINAL}So") == ("", "Hm.\n\nSo", [])


SOURCE = """{% for m in messages %}<|start|>{{ m.role }}
{%- if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{%- if m.tool_calls and m.content and m.thinking %}{{ raise_exception("both") }}{% endif %}
{%- if m.tool_calls %} to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json
{%- elif m.role == "assistant" %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>
{%- endfor %}{% for t in tools or [] %}{{ "// " + t.function.description }}
{%- endfor %}Reasoning: {{ reasoning_effort }}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
USER = {"role": "user", "content": "x"}


def tokenizer() -> Tokenizer:
    backend = some.byte_level()
    backend.add_tokens([AddedToken(token, special=True) for token in FORMAT.markers])
    return Tokenizer(backend, ChatTemplate(SOURCE, {}))


def prompt_of(messages: list[dict[str, Any]], **options: Any) -> str:
    vocabulary = tokenizer()
    prompt = render_chat(vocabulary, ChatRequest(messages, **options), OutputParserConfig())
    return vocabulary.decode(prompt.token_ids, False)


def test_templates_get_the_reasoning_by_their_own_name() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": [call]}
    text = prompt_of([USER, said, USER])
    assert f"<|start|>assistant{ANALYSIS}Hm.\n\nI look.<|end|> to=functions.f" in text
    ended = {"role": "assistant", "content": "So", "reasoning_content": "Hm."}
    text = prompt_of([USER, ended], continue_final_message=True)
    assert text.endswith(f"{ANALYSIS}Hm.<|end|>{FINAL}So")
    text = prompt_of([USER, ended | {"content": None}], continue_final_message=True)
    assert text.endswith(f"{ANALYSIS}Hm.")


def test_templates_get_one_call_per_message() -> None:
    """With its results behind it, in whatever order they came."""
    names = ("f", "g")
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in names]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("g", "f")]
    stray = {"role": "tool", "tool_call_id": "h", "content": "h"}
    said = {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": calls}
    text = prompt_of([USER, said, *results, stray, USER])
    call = " to=functions.NAME<|channel|>commentary json<|message|><|end|>"
    call += "<|start|>tool<|message|>NAME<|end|>"
    first, second = (call.replace("NAME", name) for name in names)
    assert f"{ANALYSIS}Hm.<|end|>{first}<|start|>assistant{second}" in text
    assert text.count("<|start|>tool") == 3


@pytest.mark.parametrize(
    ("effort", "shown"),
    [("minimal", "low"), ("low", "low"), ("medium", "medium"), ("max", "high")],
)
def test_efforts_are_those_that_the_model_knows(effort: Any, shown: str) -> None:
    assert f"Reasoning: {shown}<" in prompt_of([USER], reasoning_effort=effort)


def test_the_model_always_reasons() -> None:
    with pytest.raises(FieldError, match="always reasons"):
        prompt_of([USER], reasoning_effort="none")


def test_structured_answers_are_in_the_final_channel() -> None:
    vocabulary = tokenizer()
    prompt = render_chat(vocabulary, ChatRequest([USER]), OutputParserConfig())
    assert prompt.output_format.has_channels
    structured, _ = constrain_output(
        StructuredOutput(choice=("yes", "no")),
        ToolOptions(),
        prompt.output_format,
        prompt.template_source,
        vocabulary.token_to_id,
    )
    assert structured is not None
    # A message's end does not end the output.
    judge = Judge(vocabulary, str(structured.grammar), vocabulary.token_to_id("<|return|>"))
    assert judge.takes(f"{FINAL}yes")
    assert judge.takes(f"{ANALYSIS}Hm, no.{NEXT}{FINAL}no")
    for text in ("yes", f"{FINAL}maybe", f"{ANALYSIS}yes", f"{ANALYSIS}Hm.{NEXT}yes", CALL):
        assert not judge.takes(text)


def test_a_required_call_ends_the_output() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    use, vocabulary = parse_tools(tools, "required"), tokenizer()
    prompt = render_chat(vocabulary, ChatRequest([USER], use), OutputParserConfig())
    structured, _ = constrain_output(
        None, use, prompt.output_format, prompt.template_source, vocabulary.token_to_id
    )
    assert structured is not None
    judge = Judge(vocabulary, str(structured.grammar), vocabulary.token_to_id("<|call|>"))
    for text in (CALL, f"{ANALYSIS}Hm, no.{NEXT}{CALL}"):
        assert judge.takes(text)
    for text in (f"{FINAL}no", f"{ANALYSIS}Hm.{NEXT}{FINAL}no", CALL.replace("1", '"x"')):
        assert not judge.takes(text)


def test_reasoning_tokens_are_counted() -> None:
    vocabulary = tokenizer()
    text = f"{ANALYSIS}Hm, yes.{NEXT}{ANALYSIS}So.{NEXT}{FINAL}Hello"
    counted = [f"{ANALYSIS}Hm, yes.<|end|>", f"{ANALYSIS}So.<|end|>"]
    form = OutputFormat(TAGS, False, FORMAT)
    for within, prefix, more in ((False, "", []), (True, f"Hm.{NEXT}", ["Hm.<|end|>"])):
        factory = create_reasoning_counter_factory(
            vocabulary, replace(form, starts_in_reasoning=within)
        )
        assert factory is not None
        counter = factory()
        for token in vocabulary.encode(prefix + text):
            counter.add([token])
        expected = sum(len(vocabulary.encode(part)) for part in [*counted, *more])
        # Headers count with the role that they begin with.
        roles = len(vocabulary.encode("<|start|>assistant"))
        assert counter.num_tokens == expected + roles * (1 + within)
