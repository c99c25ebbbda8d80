"""Tokens of emulated models: functions of the prompt, the choice and the position."""

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.config.emulation import EmulationConfig
from gllm.models.hub import DEMO
from gllm.options.field_types import FieldError
from gllm.runtime.emulation.output import (
    CHOSEN,
    CLOSE_EVERY,
    CLOSING,
    HASHED_TOKENS,
    PASSAGE_TEXT,
    TEXT,
    EmulatedOutput,
    check_output,
    draw_lengths,
)
from gllm.text.tokenizer import Tokenizer
from tests.support.examples import num_examples

TOKENIZER = Tokenizer.load(DEMO)
VOCABULARY = TOKENIZER.vocab_size
EOS = 2
SPECIAL = TOKENIZER.special_token_ids | {EOS}


def output(**options: str) -> EmulatedOutput:
    return EmulatedOutput(EmulationConfig(**options), DEMO, [EOS], VOCABULARY)  # type: ignore[arg-type]


def tokens_of(output: EmulatedOutput, prompt: list[int], count: int, choice: int = 0) -> list[int]:
    """The first tokens of a sequence."""
    text = output.create_text(prompt, choice)
    return [text.token(index) for index in range(count)]


OUTPUTS = {
    "limit": output(),
    "fixed": output(emulated_output="fixed:7"),
    "trace": output(emulated_output="trace:sharegpt"),
    "prompt": output(emulated_text="prompt"),
}
prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=2 * HASHED_TOKENS)


@pytest.mark.parametrize("kind", OUTPUTS)
@settings(max_examples=num_examples(20, 200))
@given(prompt=prompts, choice=st.integers(0, 3), seed=st.integers(0, 99))
def test_tokens_depend_on_the_position_alone(
    kind: str, prompt: list[int], choice: int, seed: int
) -> None:
    """Another engine, and one that generates them in another order, have the same ones."""
    expected = tokens_of(OUTPUTS[kind], prompt, 40, choice)
    indices = list(range(40))
    random.Random(seed).shuffle(indices)
    again = {index: OUTPUTS[kind].create_text([*prompt], choice).token(index) for index in indices}
    assert [again[index] for index in range(40)] == expected


@pytest.mark.parametrize("kind", OUTPUTS)
@settings(max_examples=num_examples(20, 200))
@given(prompt=prompts, choice=st.integers(0, 3))
def test_no_special_token_comes_before_the_end(kind: str, prompt: list[int], choice: int) -> None:
    tokens = tokens_of(OUTPUTS[kind], prompt, 600, choice)
    length = tokens.index(EOS) if EOS in tokens else len(tokens)
    assert not SPECIAL.intersection(tokens[:length])
    # Nothing goes on after the end.
    assert set(tokens[length:]) <= {EOS}
    if kind in ("limit", "prompt"):
        assert length == len(tokens)
    if kind == "fixed":
        assert length == 6


def test_the_text_is_the_passage_from_anywhere_in_it() -> None:
    texts = [TOKENIZER.decode(tokens_of(OUTPUTS["limit"], [seed], 30)) for seed in range(20)]
    twice = TOKENIZER.decode(2 * TOKENIZER.encode(PASSAGE_TEXT, add_special_tokens=False))
    assert all(text in twice for text in texts)
    assert len(set(texts)) > 10
    choices = {tokens_of(OUTPUTS["limit"], [1, 2], 1, choice)[0] for choice in range(20)}
    assert len(choices) > 5


def test_the_text_may_be_a_file_or_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Größe und Maß\n", encoding="utf-8")
    ids = TOKENIZER.encode("Größe und Maß\n", add_special_tokens=False)
    tokens = tokens_of(output(emulated_text=str(tmp_path / "text")), [5], 2 * len(ids))
    assert tokens[: len(ids)] == tokens[len(ids) :]
    assert tokens[: len(ids)] in [[*ids[start:], *ids[:start]] for start in range(len(ids))]
    prompt = [EOS, 60, 61, *SPECIAL, 62]
    assert tokens_of(OUTPUTS["prompt"], prompt, 6) == [60, 61, 62, 60, 61, 62]
    # A prompt without text has the passage.
    assert not SPECIAL.intersection(tokens_of(OUTPUTS["prompt"], [EOS], 6))


def test_lengths_are_those_of_the_trace() -> None:
    lengths = Counter(draw_lengths("trace:sharegpt"))
    seen = set()
    for seed in range(50):
        tokens = tokens_of(OUTPUTS["trace"], [seed], 10_000)
        seen.add(1 + tokens.index(EOS))
    assert seen <= lengths.keys()
    assert len(seen) > 30


@pytest.mark.parametrize("kind", OUTPUTS)
@settings(max_examples=num_examples(20, 200))
@given(prompt=prompts, index=st.integers(0, 40))
def test_sampling_prefers_the_chosen_token(kind: str, prompt: list[int], index: int) -> None:
    text = OUTPUTS[kind].create_text(prompt, 1)
    chosen = text.token(index)
    preferences = OUTPUTS[kind].preferences(text, index, has_grammar=False)
    assert preferences.pop(chosen) == CHOSEN
    # A request that forbids the end has the text.
    assert list(preferences.values()) == ([TEXT] if chosen == EOS else [])
    with_grammar = OUTPUTS[kind].preferences(text, index, has_grammar=True)
    is_closing = index % CLOSE_EVERY == CLOSE_EVERY - 1
    assert max(with_grammar.values()) == (CLOSING if is_closing else CHOSEN)
    assert SPECIAL.intersection(with_grammar) == {EOS}


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"emulated_text": "/nowhere"}, "emulated_text", "choose a file of text"),
        ({"emulated_text": "/"}, "emulated_text", "choose a file of text"),
        ({"emulated_output": "trace:nothing"}, "emulated_output", "none of azure-conv"),
        ({"emulated_output": "trace:file:/nowhere"}, "emulated_output", "/nowhere"),
    ],
)
def test_what_is_missing_is_named(options: dict[str, str], field: str, words: str) -> None:
    config = EmulationConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(FieldError, match=words) as caught:
        check_output(config)
    assert caught.value.param == field
    with pytest.raises(FieldError, match=words):
        EmulatedOutput(config, DEMO, [EOS], VOCABULARY)


def test_files_without_text_are_named(tmp_path: Path) -> None:
    for content in (b"", b" \n", b"\xff\xfe"):
        (tmp_path / "text").write_bytes(content)
        with pytest.raises(FieldError, match="choose a file of text") as caught:
            check_output(EmulationConfig(emulated_text=str(tmp_path / "text")))
        assert caught.value.param == "emulated_text"


def test_lengths_need_a_token_that_ends_outputs() -> None:
    for eos_ids in ([], [VOCABULARY]):
        with pytest.raises(FieldError, match="no end-of-sequence token: choose limit"):
            EmulatedOutput(EmulationConfig(emulated_output="fixed:7"), DEMO, eos_ids, VOCABULARY)
        EmulatedOutput(EmulationConfig(), DEMO, eos_ids, VOCABULARY)


def test_the_model_may_have_fewer_tokens_than_its_tokenizer() -> None:
    """No other tokens are returned, and their logits do not exist."""
    few = EmulatedOutput(EmulationConfig(), DEMO, [EOS], 300)
    text = few.create_text([5], 0)
    for index in range(100):
        assert text.token(index) < 300
        assert max(few.preferences(text, index, has_grammar=True)) < 300
    assert max(few.special_ids) < 300
    with pytest.raises(FieldError, match="has no tokens"):
        EmulatedOutput(EmulationConfig(), DEMO, [EOS], 4)
