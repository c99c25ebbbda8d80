"""Requests continue after the death of every process at any position, as if nothing had happened.

Tokens and log-probabilities are compared bit by bit with those of an undisturbed run.
"""

import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from gllm.config.sampling import StructuredOutput
from gllm.messages.sampling import SequenceSamplingParams
from tests.support.engines.epochs import (
    CHUNKED,
    ChoiceOutput,
    Epoch,
    Request,
    Stages,
    run_undisturbed,
    stages_on_cpu,
    tensor_tokens,
)
from tests.support.text.grammar_writing import FOLDER, TOKENIZER, compiled_grammar

pytestmark = pytest.mark.usefixtures("compiled_kernels")

PROMPT = TOKENIZER.encode("Once upon a time there was a small engine that never", False)
EOS_IDS = [0, 2]
"""Of the demo model."""
PERSON = StructuredOutput(
    json={
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "color": {"enum": ["red", "green"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "color", "age"],
        "additionalProperties": False,
    }
)


@cache
def stages_of(num_stages: int, prefix_cache: bool = True) -> Stages:
    return stages_on_cpu(FOLDER, num_stages, prefix_cache=prefix_cache, **CHUNKED)


@cache
def greedy_output() -> tuple[int, ...]:
    """Return the demo model's undisturbed answer to PROMPT."""
    request = Request(PROMPT, SequenceSamplingParams(temperature=0.0))
    return tuple(run_undisturbed(stages_of(1), request)[-1][0].tokens)


def sampled(**fields: Any) -> Request:
    return Request(PROMPT, SequenceSamplingParams(**{"temperature": 1.0, "seed": 11} | fields))


def greedy(**fields: Any) -> Request:
    return Request(PROMPT, SequenceSamplingParams(**{"temperature": 0.0} | fields))


def with_grammar(**fields: Any) -> Request:
    request = sampled(grammar=compiled_grammar(PERSON), **fields)
    request.stop_ids, request.max_tokens = EOS_IDS, 60
    return request


def with_bad_words() -> Request:
    output = greedy_output()
    words = (output[2:4], output[5:8], output[9:10])
    return greedy(bad_words=words)


def with_min_tokens() -> Request:
    """A token that the model prefers ends the output, but not before the tenth."""
    stop_ids = tuple(set(greedy_output()))
    request = greedy(min_tokens=9, banned=stop_ids)
    request.stop_ids = list(stop_ids)
    return request


REQUESTS = {
    "greedy": greedy,
    "seed": sampled,
    "top-k, top-p, min-p": lambda: sampled(top_k=30, top_p=0.9, min_p=0.02),
    "repetition": lambda: greedy(repetition_penalty=1.4),
    "presence": lambda: greedy(presence_penalty=1.5),
    "frequency": lambda: sampled(frequency_penalty=0.8),
    "all penalties": lambda: sampled(
        repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3
    ),
    "bias": lambda: sampled(logit_bias=dict.fromkeys(greedy_output()[:6], 3.0)),
    "allowed": lambda: sampled(allowed=tuple(range(40, 90)), frequency_penalty=0.5),
    "bad words": with_bad_words,
    "min tokens": with_min_tokens,
    "log-probabilities": lambda: sampled(logprobs=3, frequency_penalty=0.5),
    "prompt log-probabilities": lambda: sampled(logprobs=1, prompt_logprobs=2),
    "prompt log-probabilities alone": lambda: greedy(prompt_logprobs=0),
    "grammar": with_grammar,
    "grammar and penalties": lambda: with_grammar(frequency_penalty=0.5, repetition_penalty=1.1),
    "grammar and log-probabilities": lambda: with_grammar(logprobs=2),
    "grammar and min tokens": lambda: with_grammar(min_tokens=20, banned=tuple(EOS_IDS)),
}


@pytest.mark.parametrize(
    ("num_stages", "stride"),
    [
        (1, 6),
        pytest.param(1, 1, marks=pytest.mark.full),
        pytest.param(2, 4, marks=pytest.mark.full),
        pytest.param(2, 1, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("request_name", REQUESTS)
def test_death_at_every_position(request_name: str, num_stages: int, stride: int) -> None:
    """Also within the tokens that a grammar forces; prompt log-probabilities told or not.

    A second stage changes who gets which tokens, and not what is done with them at a position.
    """
    stages, request = stages_of(num_stages), REQUESTS[request_name]()
    (whole,) = run_undisturbed(stages, request)[-1]
    assert len(whole.tokens) > 8
    assert whole.end is not None
    assert whole.num_first_tokens == 1
    scores_prompt = request.sampling.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == (len(PROMPT) - 1) * scores_prompt
    for length in sorted({0, *range(1, len(whole.tokens), stride)}):
        for was_told in {scores_prompt, False}:
            start = whole.cut(length, was_told)
            (output,) = Epoch(stages, request, [start]).run()
            assert output == whole, (length, was_told)


def test_the_grammar_forces_tokens_and_its_texts_fit() -> None:
    """What the test above is about."""
    request = with_grammar()
    snapshots = [outputs[0] for outputs in run_undisturbed(stages_of(1), request)]
    lengths = [len(output.tokens) for output in snapshots]
    assert max(after - before for before, after in pairwise(lengths)) > 3
    text = TOKENIZER.decode([t for t in snapshots[-1].tokens if t not in EOS_IDS], False)
    assert json.loads(text)["color"] in ("red", "green")


CHOICES = {
    "seed": lambda: sampled(seed=5),
    "penalties and log-probabilities": lambda: sampled(
        seed=6, frequency_penalty=0.6, logprobs=1, prompt_logprobs=1
    ),
    "grammar": with_grammar,
}


@pytest.mark.parametrize(
    ("num_stages", "prefix_cache", "stride"),
    [
        (2, True, 7),
        pytest.param(1, False, 1, marks=pytest.mark.full),
        pytest.param(2, True, 1, marks=pytest.mark.full),
        pytest.param(1, True, 1, marks=pytest.mark.long),
        pytest.param(2, False, 1, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("request_name", CHOICES)
def test_death_after_every_commit_of_several_choices(
    request_name: str, num_stages: int, prefix_cache: bool, stride: int
) -> None:
    """Some have ended, some have begun, some have not: each goes on with its own random numbers."""
    stages, request = stages_of(num_stages, prefix_cache), CHOICES[request_name]()
    request.n = 4
    if not request.stop_ids:
        tokens = [output.tokens for output in run_undisturbed(stages, request)[-1]]
        request.stop_ids = [tokens[1][7], tokens[2][13]]
    snapshots = run_undisturbed(stages, request)
    whole = snapshots[-1]
    assert len({tuple(output.tokens) for output in whole}) > 2
    for outputs in snapshots[:-1:stride]:
        assert Epoch(stages, request, outputs).run() == whole


@pytest.mark.parametrize("prefix_cache", [True, pytest.param(False, marks=pytest.mark.full)])
def test_choices_die_at_different_positions(prefix_cache: bool) -> None:
    stages, request = stages_of(1, prefix_cache), sampled(logprobs=0, presence_penalty=0.5)
    request.n = 3
    whole = run_undisturbed(stages, request)[-1]
    for lengths in ([0, 5, 15], [15, 0, 1], [8, 8, 8], [1, 12, 13], [0, 0, 9]):
        outputs = [
            output.cut(length, keeps_prompt_logprobs=True)
            for output, length in zip(whole, lengths, strict=True)
        ]
        assert Epoch(stages, request, outputs).run() == whole, lengths


def test_a_request_that_dies_again_and_again() -> None:
    """One token for each life."""
    stages, request = stages_of(2), sampled(logprobs=1, repetition_penalty=1.3)
    whole = run_undisturbed(stages, request)[-1]
    outputs = [ChoiceOutput()]
    num_lives = 0
    while outputs[0].end is None:
        epoch = Epoch(stages, request, outputs)
        length = len(outputs[0].tokens)
        while len(epoch.outputs[0].tokens) == length:
            epoch.commit()
        outputs = epoch.outputs
        num_lives += 1
    assert (outputs, num_lives) == (whole, request.max_tokens)


def test_an_output_that_the_grammar_does_not_allow_ends_its_request() -> None:
    request = with_grammar()
    outputs = [ChoiceOutput(tensor_tokens(5, seed=1), [], [], 1)]
    (output,) = Epoch(stages_of(1), request, outputs).run()
    assert output.end is not None
    assert output.end[0] == "error"
    assert "grammar" in output.end[2]
