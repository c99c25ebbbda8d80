"""Chats of the blocking interface: tools, reasoning and structured answers, without a server."""

import json
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest
from tokenizers import AddedToken

from gllm.config.sampling import SamplingParams, StructuredOutput
from gllm.engine.interface import OutputDelta
from gllm.engine.llm import LLM
from gllm.engine.llm_outputs import ChatCompletionOutput
from gllm.engine.request_checks import PromptTooLongError
from gllm.options.field_types import FieldError
from gllm.text.chat.template import ChatTemplate
from gllm.text.tokenizer import Tokenizer
from tests.support.http.fake_engine import Call, FakeEngine
from tests.support.text import tokenizers as some
from tests.support.text.judge import Judge

HERMES = '{% if tools %}{{ tools | tojson }}{# <tool_call> "arguments" #}{% endif %}' + some.CHATML
THINKS = HERMES + "{# </think> {{ enable_thinking }} #}{% if enable_thinking %}think{% endif %}"
OPENS = some.CHATML + "{% if add_generation_prompt %}<think>\n{% endif %}"
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Köln", "Rome"]}},
            "required": ["city"],
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
SHELL: dict[str, Any] = {"type": "custom", "custom": {"name": "shell"}}
TOOLS = [WEATHER, CLOCK]
QUESTION = [{"role": "user", "content": "How is the weather?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


class ScriptedEngine(FakeEngine):
    """A fake engine with the methods that LLM uses."""

    async def generate(
        self, prompt: list[int], params: SamplingParams, cache_salt: str = ""
    ) -> AsyncGenerator[OutputDelta, None]:
        self.calls.append(Call(prompt, params, 0, cache_salt))
        async for delta in self.script(prompt, params):
            yield delta

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass


def tokenizer(source: str | None) -> Tokenizer:
    backend = some.byte_level()
    backend.add_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    return Tokenizer(backend, None if source is None else ChatTemplate(source, {}))


Create = Callable[..., tuple[LLM, ScriptedEngine]]


@pytest.fixture
def create() -> Iterator[Create]:
    """Creates an LLM whose engine answers with a fixed text."""
    llms = []

    def create_llm(source: str | None, reply: str, **parsers: Any) -> tuple[LLM, ScriptedEngine]:
        engine = ScriptedEngine(tokenizer(source), reply=reply, max_model_len=4096)
        create_engine: Any = lambda *_, **__: engine  # noqa: E731
        llms.append(LLM("demo", progress=False, create_engine=create_engine, **parsers))
        return llms[-1], engine

    yield create_llm
    for llm in llms:
        llm.close()


def ask(llm: LLM, **options: Any) -> ChatCompletionOutput:
    (choice,) = llm.chat(QUESTION, **options).outputs
    return choice


def grammar_judge(engine: ScriptedEngine) -> Judge:
    structured = engine.calls[-1].params.structured
    assert structured is not None
    assert structured.grammar is not None
    return Judge(engine.tokenizer, structured.grammar)


def test_tool_calls_are_parsed(create: Create) -> None:
    llm, engine = create(HERMES, f"I look.\n{CALL}")
    choice = ask(llm, tools=TOOLS)
    assert (choice.content, choice.reasoning, choice.finish_reason) == ("I look.", "", "tool_calls")
    (call,) = choice.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Köln"})
    assert choice.text == f"I look.\n{CALL}"
    assert engine.calls[-1].params.structured is None
    assert "get_weather" in engine.tokenizer.decode(engine.calls[-1].prompt)


def test_a_message_continues_the_conversation(create: Create) -> None:
    llm, engine = create(HERMES, CALL)
    choice = ask(llm, tools=TOOLS)
    result = {"role": "tool", "tool_call_id": choice.tool_calls[0].id, "content": "sunny"}
    answer = llm.chat([*QUESTION, choice.message, result], tools=TOOLS)
    assert answer.prompt == engine.calls[-1].prompt
    assert "sunny" in engine.tokenizer.decode(answer.prompt)
    (call,) = choice.message["tool_calls"]
    assert call["function"]["name"] == "get_weather"


def test_a_required_call_is_enforced(create: Create) -> None:
    llm, engine = create(HERMES, CALL)
    ask(llm, tools=TOOLS, tool_choice="required")
    judge = grammar_judge(engine)
    assert judge.takes(CALL)
    assert judge.takes(f"{CALL}\n{CALL}")
    assert not judge.takes("I look.")
    ask(llm, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert not grammar_judge(engine).takes(f"{CALL}\n{CALL}")
    ask(llm, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}})
    assert not grammar_judge(engine).takes(CALL)


def test_the_input_of_a_custom_tool_is_text(create: Create) -> None:
    reply = '<tool_call>\n{"name": "shell", "arguments": {"input": "ls \\"a\\""}}\n</tool_call>'
    llm, _ = create(HERMES, reply)
    choice = ask(llm, tools=[SHELL])
    (call,) = choice.message["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "shell", "input": 'ls "a"'})


def test_reasoning_is_split_off(create: Create) -> None:
    llm, engine = create(OPENS, "hm\n</think>\n\nSunny.")
    choice = ask(llm)
    assert (choice.reasoning, choice.content) == ("hm", "Sunny.")
    assert choice.message["reasoning_content"] == "hm"
    params = SamplingParams(structured=StructuredOutput(regex="[a-z]+"))
    ask(llm, sampling_params=params)
    assert grammar_judge(engine).takes("hm</think>\nsunny")
    assert not grammar_judge(engine).takes("sunny")


@pytest.mark.parametrize(
    "options",
    [{"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "high"}],
)
def test_template_variables_reach_the_template(create: Create, options: dict[str, Any]) -> None:
    llm, engine = create(THINKS, "Sunny.")
    for given, ends in ((options, True), ({}, False)):
        ask(llm, **given)
        assert engine.tokenizer.decode(engine.calls[-1].prompt).endswith("think") == ends


def test_each_choice_is_parsed(create: Create) -> None:
    llm, _ = create(HERMES, CALL)
    outputs = llm.chat(QUESTION, SamplingParams(n=3), tools=TOOLS).outputs
    assert [len(choice.tool_calls) for choice in outputs] == [1, 1, 1]
    assert len({choice.tool_calls[0].id for choice in outputs}) == 3


def test_parsers_can_be_switched_off(create: Create) -> None:
    llm, _ = create(THINKS, f"<think>hm</think>{CALL}", tool_call_parser="none")
    choice = ask(llm, tools=TOOLS)
    assert (choice.reasoning, choice.tool_calls, choice.finish_reason) == ("hm", [], "stop")
    # Special tokens that no parser needs stay hidden.
    assert choice.content.startswith('{"name": "get_weather"')
    llm, _ = create(THINKS, "<think>hm</think>so", reasoning_parser="none")
    assert ask(llm).content == "hmso"
    with pytest.raises(FieldError, match="tool_call_parser"):
        create(HERMES, "", tool_call_parser="unknown")


def test_the_last_message_is_continued(create: Create) -> None:
    llm, engine = create(some.CHATML, " sunny.")
    messages = [*QUESTION, {"role": "assistant", "content": "It is"}]
    llm.chat(messages, continue_final_message=True)
    assert engine.tokenizer.decode(engine.calls[-1].prompt, False).endswith("It is")
    assert engine.calls[-1].params.continues_prompt
    llm.chat(messages[:1])
    assert not engine.calls[-1].params.continues_prompt, "an answer is a text of its own"


@pytest.mark.parametrize(
    ("param", "source", "options"),
    [
        ("messages", None, {}),
        ("tools", some.CHATML, {"tools": TOOLS}),
        ("tools", HERMES, {"tools": [{"type": "function"}]}),
        ("tool_choice", HERMES, {"tools": TOOLS, "tool_choice": "always"}),
        ("tool_choice", HERMES, {"tool_choice": "required"}),
        ("reasoning_effort", HERMES, {"reasoning_effort": "some"}),
        ("reasoning_effort", OPENS, {"reasoning_effort": "none"}),
        ("chat_template_kwargs", HERMES, {"chat_template_kwargs": {1: 2}}),
        ("params", HERMES, {"sampling_params": {"n": 1}}),
    ],
)
def test_invalid_arguments_are_named(
    create: Create, param: str, source: str | None, options: dict[str, Any]
) -> None:
    llm, engine = create(source, "Sunny.")
    with pytest.raises(FieldError) as error:
        ask(llm, **options)
    assert error.value.param == param
    assert engine.calls == []


def test_a_prompt_beyond_the_context_is_an_error(create: Create) -> None:
    llm, engine = create(some.CHATML, "Sunny.")
    engine.max_model_len = 16
    with pytest.raises(PromptTooLongError, match="messages"):
        ask(llm)
    ask(llm, sampling_params=SamplingParams(truncate_prompt_tokens=8))
    assert len(engine.calls[-1].prompt) == 8


def test_prompts_are_completed_in_their_order(create: Create) -> None:
    llm, engine = create(None, "Hello wörld, how are you?")
    tokens = engine.tokenizer.encode(engine.reply)
    outputs = llm.generate(["a b", "c"], SamplingParams(max_tokens=2))
    assert [output.prompt for output in outputs] == ["a b", "c"]
    assert [call.prompt for call in engine.calls] == [
        engine.tokenizer.encode(text) for text in ("a b", "c")
    ]
    for output in outputs:
        (choice,) = output.outputs
        assert (choice.token_ids, choice.finish_reason) == (tokens[:2], "length")
        assert choice.text == engine.tokenizer.decode(tokens[:2])


def test_no_prompt_runs_beside_one_that_cannot(create: Create) -> None:
    llm, engine = create(None, "Hello")
    prompts: list[list[int]]
    for prompts in ([[5], []], [[5], [10**6]], [[5], [5] * 5000]):
        with pytest.raises(FieldError, match="prompt"):
            llm.generate(prompts, SamplingParams(max_tokens=3))
    assert engine.calls == []
