"""Rows that cannot be sampled, edits, and what is told of rows."""

import math
from typing import Any

import pytest
import torch

from gllm.kernels.sampling import sample
from gllm.kernels.sampling_plan import SamplingPlan
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.runtime.worker.cpu import sampler
from gllm.runtime.worker.cpu.sampler import apply_logit_edits, sample_rows
from gllm.runtime.worker.sampling import (
    SampleOutput,
    SamplingMetadata,
    SamplingState,
    build_sampling_metadata,
    create_sampling_states,
    to_sampled_tokens,
)

GREEDY: dict[str, Any] = {"temperature": 0.0}


def state_of(
    spec: SequenceSamplingParams, prompt: tuple[int, ...] = (), output: list[int] | None = None
) -> Any:
    """The state of a sequence that has drawn `output`."""
    state = create_sampling_states(RegisterSequences(0, len(prompt), list(prompt), spec))[0]
    for token in output or []:
        state.history.append(token)
    return state


def rows_of(states: list[SamplingState], indices: list[int]) -> SamplingMetadata:
    return build_sampling_metadata([(seq, 0) for seq in range(len(states))], states, indices)


def drawn(
    logits: torch.Tensor, specs: list[SequenceSamplingParams], indices: list[int]
) -> SampleOutput:
    return sample_rows(logits.clone(), rows_of([state_of(spec) for spec in specs], indices))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_their_row(bad: float, temperature: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    specs = [SequenceSamplingParams(temperature, top_k=k, seed=4, logprobs=2) for k in (0, 0, 5)]
    wanted = drawn(logits, specs, [0, 1, 2])
    logits[1, 17] = bad
    got = drawn(logits, specs, [0, 1, 2])
    assert got.tokens == [wanted.tokens[0], 0, wanted.tokens[2]]
    assert [bool(error) for error in got.errors] == [False, True, False]
    assert got.details == [wanted.details[0], wanted.details[2]]


def test_only_logits_that_are_not_finite_cast_doubt_on_the_cache() -> None:
    """A row that fails for its request's sampling fields leaves its KV blocks to others."""
    logits = torch.zeros(3, 50)
    logits[1, 17] = float("nan")
    specs = [
        SequenceSamplingParams(),
        SequenceSamplingParams(),
        SequenceSamplingParams(logit_bias=dict.fromkeys(range(50), -math.inf)),
    ]
    rows = rows_of([state_of(spec) for spec in specs], [0, 0, 0])
    told = to_sampled_tokens(rows, sample_rows(logits, rows))
    assert [bool(row.error) for row in told] == [False, True, True]
    assert [row.is_finite for row in told] == [True, False, True]


def test_banned_tokens_wait_for_min_tokens() -> None:
    spec = SequenceSamplingParams(**GREEDY, min_tokens=2, banned=(3, 4, 1_000_000))
    states = [state_of(spec, output=[0] * index) for index in range(4)]
    got = sample_rows(torch.arange(5.0).repeat(4, 1), rows_of(states, [0, 1, 2, 3]))
    assert got.tokens == [2, 2, 4, 4]
    assert not any(got.errors)


@pytest.mark.parametrize(
    "spec",
    [
        SequenceSamplingParams(min_tokens=1, banned=tuple(range(5))),
        SequenceSamplingParams(temperature=0.0, allowed=(2,), bad_words=((2,),)),
        SequenceSamplingParams(
            allowed=(1, 3), bad_words=((1,), (3,)), logit_bias={1: 100.0}, logprobs=1
        ),
    ],
    ids=str,
)
def test_everything_forbidden_is_an_error_of_the_row(spec: SequenceSamplingParams) -> None:
    got = drawn(torch.arange(5.0).repeat(2, 1), [spec, SequenceSamplingParams(**GREEDY)], [0, 0])
    assert got.tokens[1] == 4
    assert "forbidden" in got.errors[0]
    assert not got.errors[1]
    assert not got.details


def test_an_exception_ends_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rows are drawn once more, from the logits as they were before they were edited."""
    kernel = sample

    def breaks(logits: torch.Tensor, plan: SamplingPlan) -> torch.Tensor:
        if (logits[:, 0] == 7).any():
            raise RuntimeError("no luck")
        return kernel(logits, plan)

    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 9, generator=generator)
    logits[1, 0], logits[3, 2] = 7, math.nan
    specs = [SequenceSamplingParams(seed=i, logit_bias={3: 1.5}, logprobs=1) for i in range(4)]
    specs[1] = SequenceSamplingParams(seed=1)
    monkeypatch.setattr(sampler, "sample", breaks)
    got = drawn(logits, specs, [0] * 4)
    assert [bool(error) for error in got.errors] == [False, True, False, True]
    assert "no luck" in got.errors[1]
    assert "not finite" in got.errors[3]
    monkeypatch.undo()
    wanted = drawn(logits, specs, [0] * 4)
    assert (got.tokens[0], got.tokens[2]) == (wanted.tokens[0], wanted.tokens[2])
    assert got.details == wanted.details


def test_no_rows() -> None:
    assert sample_rows(torch.empty(0, 5), rows_of([], [])) == SampleOutput([], [], [])


def test_allowed_tokens_are_the_only_ones() -> None:
    logits = torch.randn(300, 40, generator=torch.Generator().manual_seed(1))
    got = drawn(
        logits, [SequenceSamplingParams(seed=i, allowed=(7, 31)) for i in range(300)], [0] * 300
    )
    assert set(got.tokens) == {7, 31}


def test_bad_words_are_banned_where_they_would_be_complete() -> None:
    words = ((4,), (3, 2), (1, 1, 3), (0, 3, 3))
    spec = SequenceSamplingParams(**GREEDY, bad_words=words)
    outputs = [[], [3], [1, 1], [1], [1, 1, 3], [0, 3], [3, 3]]
    # Likeliest first: 4, which is always forbidden, then 3, 2, 1, 0.
    states = [state_of(spec, output=output) for output in outputs]
    logits = torch.arange(5.0).repeat(len(outputs), 1)
    got = sample_rows(logits.clone(), rows_of(states, [len(output) for output in outputs]))
    assert got.tokens == [3, 3, 2, 3, 3, 1, 3]
    # 2 is forbidden after 3 as well.
    logits[:, 3] = -9
    states = [state_of(spec, output=output) for output in outputs]
    got = sample_rows(logits, rows_of(states, [len(output) for output in outputs]))
    assert got.tokens == [2, 1, 2, 2, 1, 1, 1]


def test_bias_and_bans_and_penalties_come_in_their_order() -> None:
    """The bias is added before the penalty looks at the sign."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.5]])
    spec = SequenceSamplingParams(
        **GREEDY, logit_bias={2: -4.0}, repetition_penalty=2.0, bad_words=((1,),)
    )
    state = state_of(spec, prompt=(2, 0))
    edited = logits.clone()
    apply_logit_edits(edited, [state], [0], [0])
    assert edited.tolist() == [[0.5, -math.inf, -2.0, 0.5]]


def test_a_row_sees_exactly_the_output_before_it() -> None:
    """Drawn again at an earlier index, the state forgets what came after."""
    spec = SequenceSamplingParams(
        seed=3, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3
    )
    logits = torch.randn(30, 12, generator=torch.Generator().manual_seed(5))

    def run(order: list[int]) -> dict[int, int]:
        state = state_of(spec, prompt=(1, 2, 2))
        tokens = {}
        for index in order:
            got = sample_rows(logits[index : index + 1].clone(), rows_of([state], [index]))
            tokens[index] = got.tokens[0]
        assert state.history.tokens == [tokens[i] for i in range(len(tokens))]
        return tokens

    straight = run(list(range(30)))
    assert run([0, 1, 2, 1, 2, 3, 0, *range(1, 30), 15, *range(16, 30)]) == straight
    assert run([*range(30), 0, *range(1, 30)]) == straight


def test_a_gap_in_the_output_is_an_error() -> None:
    spec = SequenceSamplingParams(**GREEDY, presence_penalty=1.0)
    got = sample_rows(
        torch.zeros(2, 5),
        rows_of([state_of(spec), state_of(SequenceSamplingParams(**GREEDY))], [2, 2]),
    )
    assert [bool(error) for error in got.errors] == [True, False]


def test_plain_rows_keep_nothing() -> None:
    states = [state_of(SequenceSamplingParams(seed=i, top_p=0.5)) for i in range(3)]
    rows = rows_of(states, [4, 5, 6])
    assert (rows.edited_rows, rows.logprob_rows) == ([], [])
    sample_rows(torch.zeros(3, 5), rows)
    assert all(state._history is None for state in states)


def test_choices_share_the_edits_and_one_tells_the_prompt() -> None:
    spec = SequenceSamplingParams(logit_bias={1: 2.0}, prompt_logprobs=3, repetition_penalty=1.2)
    states = create_sampling_states(RegisterSequences(5, 3, [7, 8, 9], spec, n=3))
    assert [state.params.choice for state in states] == [0, 1, 2]
    assert [state.params.prompt_logprobs for state in states] == [3, None, None]
    assert all(state.edits is states[0].edits for state in states)
    assert all(state.history is not states[0].history for state in states[1:])
    assert [state.prompt for state in states] == [[7, 8, 9]] * 3


ALL = SequenceSamplingParams(
    temperature=0.9,
    top_k=15,
    top_p=0.9,
    seed=8,
    repetition_penalty=1.3,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={3: 2.0, 9: -1.0},
    bad_words=((5,), (3, 4)),
    allowed=tuple(range(30)),
    logprobs=4,
)


def test_a_row_is_the_same_in_any_batch() -> None:
    """Tokens and what is told, bit by bit, beside rows of every other kind."""
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(4))
    neighbours = [
        SequenceSamplingParams(seed=1),
        SequenceSamplingParams(**GREEDY),
        SequenceSamplingParams(seed=2, logprobs=20),
        SequenceSamplingParams(seed=3, presence_penalty=2.0),
        SequenceSamplingParams(seed=5, repetition_penalty=3.0),
    ]
    alone, together = state_of(ALL, prompt=(3, 9, 11)), state_of(ALL, prompt=(3, 9, 11))
    others = [state_of(spec, prompt=(1, 2)) for spec in neighbours]
    for index in range(40):
        row = logits[index : index + 1]
        one = sample_rows(row.clone(), rows_of([alone], [index]))
        crowd = torch.cat((logits[:2], row, logits[5:8])).clone()
        many = sample_rows(crowd, rows_of([*others[:2], together, *others[2:]], [index] * 6))
        assert many.tokens[2] == one.tokens[0]
        told = next(entry for entry in many.details if entry.seq == 2)
        assert told.sampled == one.details[0].sampled


def test_what_is_told_is_of_the_raw_logits() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(6))
    spec = SequenceSamplingParams(
        temperature=0.3, allowed=(11, 12), logit_bias={11: 50.0}, logprobs=3
    )
    got = drawn(logits, [spec], [0])
    entry = got.details[0].sampled
    assert entry is not None
    wanted = logits[0].double().log_softmax(-1)
    assert (got.tokens, entry.token) == ([11], 11)
    assert entry.logprob == pytest.approx(wanted[11].item(), abs=1e-5)
    assert entry.rank == int((logits[0] > logits[0, 11]).sum()) + 1
    assert entry.top_ids == logits[0].argsort(descending=True)[:3].tolist()
    assert entry.top_logprobs == pytest.approx(wanted.sort(descending=True)[0][:3].tolist())
    assert got.details[0].prompt_logprobs == []
    none = drawn(logits, [SequenceSamplingParams(logprobs=0)], [0]).details[0].sampled
    assert none is not None
    assert (none.top_ids, none.top_logprobs) == ([], [])
