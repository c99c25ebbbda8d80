"""Parts of an engine's output that its router keeps back, on messages made by hand."""

from gllm.messages.requests import EngineOutputs
from gllm.messages.sampling import SampleDetails, SequenceSamplingParams
from gllm.router.output_checks import (
    can_be_handed_off,
    end_all_choices,
    without_ends,
    without_tokens,
)
from gllm.runtime.head.journal import JournalEntry
from gllm.scheduler.plan import FinishedSequence, FirstToken, SchedulerStats, StepOutput


def message(*ends: FinishedSequence) -> EngineOutputs:
    """Return the output of sequences 1, 2 and 3, each with a first token and details."""
    seqs = [1, 2, 3]
    step = StepOutput(seqs, [7, 8, 9], [FirstToken(seq, 0, 0.0) for seq in seqs], list(ends))
    return EngineOutputs(step, SchedulerStats(), [SampleDetails(seq, None, []) for seq in seqs])


def test_tokens_are_left_out_with_what_comes_with_them() -> None:
    given = message(FinishedSequence(2, "length"))
    left = without_tokens(given, {2})
    assert (left.outcome.seqs, left.outcome.token_ids) == ([1, 3], [7, 9])
    assert [first.seq for first in left.outcome.first_tokens] == [1, 3]
    assert [row.seq for row in left.details] == [1, 3]
    assert left.outcome.finished == given.outcome.finished
    assert given.outcome.seqs == [1, 2, 3]


def test_ends_are_left_out_without_their_tokens() -> None:
    given = message(FinishedSequence(1, "length"), FinishedSequence(2, "stop"))
    left = without_ends(given, {1})
    assert left.outcome.finished == [FinishedSequence(2, "stop")]
    assert left.outcome.seqs == [1, 2, 3]


def test_the_end_of_a_choice_is_that_of_its_request() -> None:
    failed, other = FinishedSequence(1, "error", error="no"), FinishedSequence(3, "stop")
    given = message(failed, other)
    given.error_kinds.append((1, "poison"))
    whole = end_all_choices(given, [(failed, [1, 2])])
    assert whole.outcome.finished == [failed, other, FinishedSequence(2, "error", error="no")]
    assert sorted(whole.error_kinds) == [(1, "poison"), (2, "poison")]


def entry(num_prompt_tokens: int = 2, max_tokens: int = 2, n: int = 1) -> JournalEntry:
    return JournalEntry(
        [5] * num_prompt_tokens, SequenceSamplingParams(), max_tokens, [], n, 0, "", 0.0
    )


def test_requests_with_more_than_one_token_are_handed_off() -> None:
    assert can_be_handed_off(entry())
    assert not can_be_handed_off(entry(max_tokens=1))
    assert can_be_handed_off(entry(num_prompt_tokens=1))
    assert not can_be_handed_off(entry(num_prompt_tokens=1, n=2))
    begun = entry()
    begun.outputs[0].append(7)
    assert not can_be_handed_off(begun)
    for sampling in (
        SequenceSamplingParams(prompt_logprobs=1),
        SequenceSamplingParams(embeds=True),
    ):
        special = JournalEntry([5, 6], sampling, 2, [], 1, 0, "", 0.0)
        assert not can_be_handed_off(special)
