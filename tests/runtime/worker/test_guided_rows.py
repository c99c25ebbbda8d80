"""Rows with grammars: what is drawn, what is forced, what goes wrong, who is not disturbed."""

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from gllm.config.sampling import StructuredOutput
from gllm.kernels.sampling import sample
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.runtime.worker.cpu.sampler import sample_rows
from gllm.runtime.worker.sampling import (
    SampleOutput,
    SamplingState,
    build_sampling_metadata,
    create_sampling_states,
    fail_guides,
    to_sampled_tokens,
)
from gllm.text.grammar.guide import GrammarGuide, GrammarGuideError, GuideOptions
from tests.support.text.grammar_writing import (
    EOS,
    TOKENIZER,
    TOKENS,
    VOCABULARY,
    grammars,
    state_of,
    step,
    text_of,
)
from tests.support.text.grammar_writing import write as write_all

PERSON = StructuredOutput(
    json={
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "color": {"enum": ["red", "green"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "color", "age"],
        "additionalProperties": False,
    }
)
WORDS = StructuredOutput(regex="(blue|bread|red) [0-9]{2,3}")


@pytest.fixture(scope="module")
def owner():
    return grammars()


def guide_of(state: SamplingState) -> GrammarGuide:
    assert state.guide is not None
    return state.guide


def matcher_of(state: SamplingState) -> LLMatcher:
    """Return a matcher at the start of a state's grammar."""
    return LLMatcher(TOKENS, state.params.grammar, log_level=0)


def guide_with(matcher: Any, **limits: float) -> GrammarGuide:
    """Return a guide that follows a matcher."""
    now = ThreadPoolExecutor(1).submit
    return GrammarGuide(now, now, lambda: matcher, GuideOptions(VOCABULARY, EOS, True, **limits))


def noise(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def test_forced_tokens_come_with_the_one_before(owner):
    state = state_of(PERSON, owner, temperature=0.0)
    first = step([state], [0], noise())
    begin = [first.tokens[0], *first.forced_tokens[0]]
    assert TOKENIZER.decode(begin, False) == '{"name":"'
    assert to_sampled_tokens(build_sampling_metadata([(4, 1)], [state], [0]), first)[
        0
    ].further_token_ids == tuple(begin[1:])


@pytest.mark.parametrize("wanted", [PERSON, WORDS, StructuredOutput(choice=("yes", "no", "yes!"))])
def test_forced_or_drawn_one_by_one_the_text_fits(owner, wanted):
    """With log-probabilities every token is drawn; so many draws does forcing save."""
    plain = [state_of(wanted, owner, seed=seed) for seed in range(8)]
    telling = [state_of(wanted, owner, seed=seed, logprobs=1) for seed in range(8)]
    for states in (plain, telling):
        for output in write_all(states, 100):
            text = text_of(output)
            assert output[-1] == EOS
            if wanted is PERSON:
                assert json.loads(text)["color"] in ("red", "green")
            elif wanted is WORDS:
                assert text.split()[0] in ("blue", "bread", "red")
            else:
                assert text in ("yes", "no", "yes!")


def test_log_probabilities_are_told_of_every_token(owner):
    state = state_of(PERSON, owner, logprobs=2)
    for index in range(6):
        drawn = step([state], [index], noise(seed=index))
        assert drawn.forced_tokens == {0: ()}
        logprobs = drawn.details[0].sampled
        assert logprobs is not None
        assert logprobs.token == drawn.tokens[0]


def test_rows_planned_before_a_token_was_forced_get_it(owner):
    """With lookahead rows are under way that draw what is settled by now; they say the same, and
    nothing twice."""
    state = state_of(PERSON, owner)
    first = step([state], [0], noise())
    settled = [first.tokens[0], *first.forced_tokens[0]]
    for index in range(1, len(settled)):
        later = step([state], [index], noise(seed=index))
        assert (later.tokens, later.forced_tokens, later.errors) == (
            [settled[index]],
            {0: ()},
            [""],
        )
    free = step([state], [len(settled)], noise(seed=9))
    assert not free.errors[0]
    again = step([state], [2], noise())
    assert again.tokens == [settled[2]], "a row may come late"


def test_the_end_is_forced(owner):
    state = state_of(StructuredOutput(regex="fixed text"), owner)
    only = step([state], [0], noise())
    output = [only.tokens[0], *only.forced_tokens[0]]
    assert (text_of(output), output[-1]) == ("fixed text", EOS)


def test_an_end_that_is_drawn_is_the_last_token(owner):
    state = state_of(StructuredOutput(regex="[0-9]{1,9}"), owner, temperature=0.0)
    logits = noise()
    logits[0, EOS] = 100.0
    assert step([state], [0], logits).tokens != [EOS], "something has to be there"
    assert step([state], [1], logits).tokens == [EOS]
    assert guide_of(state).settled_token(1) == EOS
    with pytest.raises(IndexError):
        guide_of(state).settled_token(2)


def test_edits_see_every_token_and_hold_within_the_grammar(owner):
    digit = TOKENIZER.encode("7", add_special_tokens=False)
    allowed = (*digit, *TOKENIZER.encode("x", add_special_tokens=False), EOS)
    state = state_of(StructuredOutput(regex="[0-9]+x"), owner, allowed=allowed, seed=4)
    output = write_all([state], 50)[0]
    assert set(text_of(output)) == {"7", "x"}
    none = state_of(StructuredOutput(regex="[a-f]+"), owner, allowed=tuple(digit))
    assert step([none], [0], noise()).errors == ["every token of the vocabulary is forbidden"]


def test_penalties_count_forced_tokens(owner):
    state = state_of(PERSON, owner, repetition_penalty=1.5, presence_penalty=0.5, seed=2)
    output = write_all([state], 100)[0]
    assert state.history.tokens == output
    assert sum(state.history.counts) == len(output)


def plain(seed: int) -> SamplingState:
    return SamplingState(SequenceSamplingParams(seed=seed, top_p=0.9), None, [])


def test_rows_without_a_grammar_are_drawn_as_if_alone(owner):
    logits = noise(5, seed=8)
    guided = [state_of(PERSON, owner, seed=1), state_of(WORDS, owner, seed=2)]
    alone = [step([plain(i)], [3], logits[i : i + 1]).tokens[0] for i in (0, 2, 4)]
    for _ in range(2):
        crowd = [plain(0), guided[0], plain(2), guided[1], plain(4)]
        drawn = step(crowd, [3, 0, 3, 0, 3], logits)
        assert [drawn.tokens[row] for row in (0, 2, 4)] == alone


def test_a_grammar_that_cannot_go_on_ends_its_own_row(owner):
    wide = StructuredOutput(regex="[a-z]{1,4}")
    good, bad = state_of(wide, owner), state_of(wide, owner)
    matcher = matcher_of(bad)
    bad.guide = guide_with(matcher)
    step([good, bad], [0, 0], noise(2))
    guide_of(bad).allowed_tokens(1)  # Waits: a thread may still look at the matcher.
    matcher.consume_token(EOS + 1)  # "!" is no letter.
    drawn = step([bad, good, plain(1)], [1, 1, 5], noise(3))
    assert [bool(error) for error in drawn.errors] == [True, False, False]
    drawn = step([bad], [1], noise())
    assert drawn.errors[0]
    assert drawn.tokens == [0]


def test_rows_drawn_one_by_one_after_a_fault_take_each_token_once(owner, monkeypatch):
    from gllm.runtime.worker.cpu import sampler

    calls: list[int] = []

    def fails_first(logits, plan):
        calls.append(len(logits))
        if len(calls) == 1:
            raise RuntimeError("once")
        return sample(logits, plan)

    states = [state_of(WORDS, owner, seed=3), plain(1)]
    wanted = step([state_of(WORDS, owner, seed=3), plain(1)], [0, 1], noise(2))
    monkeypatch.setattr(sampler, "sample", fails_first)
    got = step(states, [0, 1], noise(2))
    assert (got.tokens, got.forced_tokens, calls) == (
        wanted.tokens,
        wanted.forced_tokens,
        [2, 1, 1],
    )


def test_a_grammar_that_does_not_compile_is_told(owner):
    spec = SequenceSamplingParams(grammar='{"grammars": [{"lark_grammar": "start: ("}]}')
    state = create_sampling_states(RegisterSequences(0, 1, [], spec), owner)[0]
    assert isinstance(guide_of(state).first_mask.exception(20), GrammarGuideError)
    drawn = step([state, plain(1)], [0, 0], noise(2))
    assert ["does not compile" in error for error in drawn.errors] == [True, False]


def test_a_mask_that_never_comes_ends_its_own_row():
    def never(work):
        return Future()

    def no_matcher() -> Any:
        return None

    options = GuideOptions(VOCABULARY, EOS, True, mask_seconds=0.01)
    guide = GrammarGuide(never, never, no_matcher, options)
    stuck = SamplingState(SequenceSamplingParams(grammar="x"), None, [], guide)
    drawn: SampleOutput = sample_rows(
        noise(2), build_sampling_metadata([(0, 0), (1, 0)], [stuck, plain(1)], [0, 0])
    )
    assert ["takes over" in error for error in drawn.errors] == [True, False]


def asked_meanwhile(guide: GrammarGuide, index: int) -> "Future[int | bytes]":
    """What is allowed at `index`, asked by another thread that has to wait for it."""
    pool = ThreadPoolExecutor(1)
    asked = pool.submit(guide.allowed_tokens, index)
    pool.shutdown(wait=False)
    with pytest.raises(TimeoutError):
        asked.result(0.05)
    return asked


def test_who_is_ahead_waits_for_the_token_before(owner):
    """As on a device, whose next step is given while this one's tokens are not back."""
    guide = guide_of(state_of(StructuredOutput(regex="[ab][cd][ef]x"), owner))
    mask = guide.allowed_tokens(0)
    assert isinstance(mask, bytes)
    asked = asked_meanwhile(guide, 1)
    guide.accept_token(0, TOKENIZER.encode("a", add_special_tokens=False)[0])
    assert asked.result(10) not in (mask, guide.settled_token(0))
    asked = asked_meanwhile(guide, 3)
    guide.accept_token(1, TOKENIZER.encode("c", add_special_tokens=False)[0])
    guide.accept_token(2, TOKENIZER.encode("f", add_special_tokens=False)[0])
    last = asked.result(10)
    assert isinstance(last, int)
    assert TOKENIZER.decode([last]) == "x"


def test_nobody_waits_for_a_sequence_that_has_failed(owner):
    state = state_of(WORDS, owner)
    guide_of(state).allowed_tokens(0)
    asked = asked_meanwhile(guide_of(state), 1)
    fail_guides([state, plain(1)], "no memory")
    with pytest.raises(GrammarGuideError, match="its step failed: no memory"):
        asked.result(10)
    drawn = step([state, plain(1)], [1, 1], noise(2))
    assert drawn.errors == ["its step failed: no memory", ""]


@pytest.mark.parametrize("method", ["compute_bitmask", "consume_token", "compute_ff_tokens"])
def test_a_library_that_raises_ends_its_own_row_only(owner, method):
    class Broken:
        def __init__(self, matcher):
            self._matcher = matcher

        def __getattr__(self, name):
            if name == method:
                raise RuntimeError("no memory")
            return getattr(self._matcher, name)

    state = state_of(WORDS, owner)
    state.guide = guide_with(Broken(matcher_of(state)))
    drawn = step([state, plain(1)], [0, 0], noise(2))
    assert "no memory" in drawn.errors[0]
    assert not drawn.errors[1]
    assert step([state], [1], noise()).errors == [drawn.errors[0]]


def test_a_token_that_never_comes_ends_the_wait(owner):
    guide = guide_with(matcher_of(state_of(WORDS, owner)), token_seconds=0.01)
    with pytest.raises(GrammarGuideError, match=r"did not come in 0\.01 s"):
        guide.allowed_tokens(1)


def test_compiled_grammars_are_kept_and_bounded():
    made = grammars(max_compiled=2, max_copies=3)
    before = set(threading.enumerate())
    texts = [json.dumps({"grammars": [{"lark_grammar": f'start: "{c}"'}]}) for c in "abc"]
    counts = []
    # A matcher has three copies. The third grammar takes the place of the first one.
    for name in "aaaabcbca":
        text = texts["abc".index(name)]
        made.create_guide(SequenceSamplingParams(grammar=text)).first_mask.result(20)
        counts.append(made.num_compilations)
    assert counts == [1, 1, 1, 2, 3, 4, 4, 4, 5]
    names = [thread.name for thread in set(threading.enumerate()) - before]
    assert [name.startswith("grammar-compiler") for name in names] == [True]


def test_choices_have_guides_of_their_own(owner):
    spec = state_of(WORDS, owner).params
    states = create_sampling_states(RegisterSequences(5, 3, [7, 8, 9], spec, n=3), owner)
    outputs = write_all(states, 100)
    assert len({state.guide for state in states}) == 3
    assert all(output[-1] == EOS for output in outputs)
