"""Forms of prompts and parameters that LLM takes, and what becomes of a prompt that fails."""

from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gllm.config.sampling import SamplingParams
from gllm.engine.interface import EmbeddingError, EngineUnavailableError, OutputDelta
from gllm.engine.interface import PoisonRequestError as PoisonError
from gllm.engine.llm import LLM
from gllm.engine.llm_prompts import convert_params, convert_prompts
from gllm.options.field_types import FieldError
from tests.engine.test_llm_chat import ScriptedEngine, tokenizer
from tests.support.text import tokenizers as some

GREEDY = SamplingParams(temperature=0, max_tokens=3)


class FailingEngine(ScriptedEngine):
    """An engine that fails for prompts which begin with certain tokens."""

    def __init__(self, source: str | None = None, **options: Any) -> None:
        super().__init__(
            tokenizer(source), reply="Hello wörld, how are you?", max_model_len=4096, **options
        )
        self.errors: dict[int, Exception] = {}

    async def generate(
        self, prompt: list[int], params: SamplingParams, cache_salt: str = ""
    ) -> AsyncGenerator[OutputDelta, None]:
        if prompt[0] in self.errors:
            yield OutputDelta(0, "He", [1])
            raise self.errors[prompt[0]]
        async for delta in super().generate(prompt, params, cache_salt):
            yield delta

    async def embed(self, prompt: Any, **options: Any) -> list[float]:
        if prompt[0] in self.errors:
            raise self.errors[prompt[0]]
        return await super().embed(prompt, **options)


@pytest.fixture
def create() -> Iterator[Callable[..., tuple[LLM, FailingEngine]]]:
    llms = []

    def create_llm(source: str | None = None) -> tuple[LLM, FailingEngine]:
        engine = FailingEngine(source)
        create_engine: Any = lambda *_, **__: engine  # noqa: E731
        llms.append(LLM("demo", progress=False, create_engine=create_engine))
        return llms[-1], engine

    yield create_llm
    for llm in llms:
        llm.close()


@pytest.mark.parametrize(
    ("prompts", "shown", "token_ids"),
    [
        ("a b", ["a b"], [None]),
        (["a", "b"], ["a", "b"], [None, None]),
        (iter(["a", "b"]), ["a", "b"], [None, None]),
        ((text for text in ("a", "b")), ["a", "b"], [None, None]),
        ([5, 6], [[5, 6]], [[5, 6]]),
        ([[5, 6], "a"], [[5, 6], "a"], [[5, 6], None]),
        (([5], (6, 7)), [[5], [6, 7]], [[5], [6, 7]]),
        (np.array([5, 6]), [[5, 6]], [[5, 6]]),
        (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]], [[5, 6], [7, 8]]),
        ({"prompt": "a"}, ["a"], [None]),
        ({"prompt_token_ids": [5]}, [[5]], [[5]]),
        ([{"prompt_token_ids": [5], "prompt": "a"}], ["a"], [[5]]),
        ({"prompt": "a", "multi_modal_data": None}, ["a"], [None]),
        ([], [], []),
    ],
)
def test_forms_of_prompts(prompts: Any, shown: list[Any], token_ids: list[Any]) -> None:
    converted = convert_prompts(prompts)
    assert [prompt.shown for prompt in converted] == shown
    assert [prompt.token_ids for prompt in converted] == token_ids


@pytest.mark.parametrize(
    ("prompts", "name"),
    [
        (5, "prompts"),
        (None, "prompts"),
        ([None], "prompts[0]"),
        (["a", 5.5], "prompts[1]"),
        ([[5, "a"]], "prompts[0][1]"),
        ({}, "prompts[0]"),
        ({"prompt": 5}, "prompts[0].prompt"),
        ({"prompt": "a", "multi_modal_data": {}}, "prompts[0].multi_modal_data"),
        ({"prompt": "a", "cache_salt": 5}, "prompts[0].cache_salt"),
    ],
)
def test_other_forms_are_refused(prompts: Any, name: str) -> None:
    with pytest.raises(FieldError) as error:
        convert_prompts(prompts)
    assert error.value.param == "prompts"
    assert name in str(error.value)


def test_parameters_for_each_prompt() -> None:
    one, two = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    assert convert_params(one, {}, 2) == [one, one]
    assert convert_params([one, two], {}, 2) == [one, two]
    assert convert_params(None, {"temperature": 0.5}, 1)[0].temperature == 0.5
    with pytest.raises(FieldError, match="3 prompts"):
        convert_params([one, two], {}, 3)


def test_each_prompt_has_its_parameters_and_its_tokens(create: Any) -> None:
    llm, engine = create()
    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2, n=2)]
    first, second = llm.generate(iter([{"prompt": "a b", "cache_salt": "s"}, "c"]), params)
    assert first.prompt_token_ids == engine.tokenizer.encode("a b")
    assert (len(first.outputs), len(second.outputs)) == (1, 2)
    assert [len(each.token_ids) for each in second.outputs] == [2, 2]
    assert [call.cache_salt for call in engine.calls] == ["s", ""]
    assert llm.generate([]) == []


@pytest.mark.parametrize("error", [PoisonError("it kills"), EngineUnavailableError("full", "busy")])
def test_a_prompt_that_fails_leaves_the_others_alone(create: Any, error: Exception) -> None:
    llm, engine = create()
    engine.errors[7] = error
    bad, good = llm.generate([[7], [8]], GREEDY)
    choice = bad.outputs[0]
    assert (bad.error, choice.finish_reason, choice.text) == (str(error), "error", "He")
    assert (good.error, good.outputs[0].finish_reason) == ("", "length")


def test_an_error_of_all_prompts_is_raised_and_one_of_the_program_too(create: Any) -> None:
    llm, engine = create()
    engine.errors = {7: EngineUnavailableError("sleeping", "it sleeps"), 8: ValueError("a bug")}
    with pytest.raises(EngineUnavailableError, match="it sleeps"):
        llm.generate([[7], [7]], GREEDY)
    with pytest.raises(ValueError, match="a bug"):
        llm.generate([[5], [8], [5]], GREEDY)
    assert [call.prompt for call in engine.calls] == [[5], [5]]


def test_embeddings(create: Any) -> None:
    llm, engine = create()
    engine.errors[7] = EmbeddingError("not finite")
    bad, good = llm.embed([[7], [9]])
    assert (bad.error, bad.outputs.embedding) == ("not finite", [])
    assert (good.error, good.outputs.embedding[0], good.prompt_token_ids) == ("", 9.0, [9])
    with pytest.raises(FieldError, match="empty"):
        llm.embed([[5], []])


def test_several_conversations(create: Any) -> None:
    llm, engine = create(some.CHATML)
    chats = [[{"role": "user", "content": text}] for text in ("Hi", "How are you?")]
    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)]
    first, second = llm.chat(chats, params)
    assert [len(each.outputs[0].token_ids) for each in (first, second)] == [1, 2]
    assert second.prompt_token_ids == engine.calls[1].prompt
    assert llm.chat(chats[0], params[0]) == first
    assert llm.chat(chats[:1], params[0]) == [first]
    assert first.error == ""
    with pytest.raises(FieldError, match="2 prompts"):
        llm.chat(chats, params[:1])
