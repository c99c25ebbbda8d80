"""Requests while their driver is gone, and after a new one is attached."""

from array import array
from typing import Any

import pytest

from gllm.messages.reports import BubbleReport, StageUtilization, StepCostReport
from gllm.messages.requests import (
    AbortSequences,
    EngineOutputs,
    PoisonRequestError,
    SubmitRequest,
)
from gllm.messages.sampling import SampleDetails, SequenceSamplingParams, TokenLogprobs
from gllm.runtime.head.client import EngineClient
from gllm.runtime.head.journal import JournalEntry
from gllm.runtime.head.request_stream import RequestStream
from gllm.scheduler.plan import FinishedSequence, FirstToken, SchedulerStats, StepOutput
from gllm.scheduler.step_cost import StepCostCoefficients

SAMPLING = SequenceSamplingParams()
BUSY = SchedulerStats(running=1, in_flight=1)


class Rig:
    """A client and what it sends to its present driver."""

    def __init__(self) -> None:
        self.now = 100.0
        self.client = EngineClient(lambda: self.now)
        self.sent: list[SubmitRequest | AbortSequences] = []

    def attach(self) -> list[SubmitRequest | AbortSequences]:
        self.sent = []
        self.client.attach(self.sent.append)
        return self.sent

    def submit(self, *prompt: int, n: int = 1, request_id: str = "", **given: Any) -> RequestStream:
        sampling = SequenceSamplingParams(**given)
        return self.client.submit([*prompt], sampling, 8, [99], n, request_id=request_id)

    def report(
        self, *tokens: tuple[int, int], ends: tuple[int, ...] = (), stats: SchedulerStats = BUSY
    ) -> None:
        finished = [FinishedSequence(seq, "length") for seq in ends]
        firsts = [FirstToken(seq, 3, 0.5) for seq, _ in tokens]
        seqs, ids = [seq for seq, _ in tokens], [token for _, token in tokens]
        output = StepOutput(seqs, ids, firsts, finished, len(tokens))
        self.client.on_report(EngineOutputs(output, stats))

    def die(self, *seqs: int) -> bool:
        is_poison = self.client.on_death(set(seqs))
        self.client.detach("killed")
        return is_poison

    def submitted(self) -> list[int]:
        """Return the prompts' first tokens, which name the requests."""
        return [each.prompt[0] for each in self.sent if isinstance(each, SubmitRequest)]


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.attach()
    return rig


def test_a_request_goes_on_with_the_tokens_that_its_reader_has(rig: Rig) -> None:
    stream = rig.submit(1, 2, n=3)
    rig.report((0, 10), (2, 30))
    rig.report((0, 11), (1, 20), ends=(1,))
    deltas = stream.pop_deltas()
    assert [deltas[choice].tokens for choice in range(3)] == [[10, 11], [20], [30]]
    rig.die(0, 2)
    (message,) = rig.attach()
    assert isinstance(message, SubmitRequest)
    assert (message.seq, message.n, message.prompt) == (3, 2, [1, 2])
    assert (message.choices, message.outputs) == ([0, 2], [[10, 11], [30]])
    assert (message.max_tokens, message.stop_ids) == (8, [99])
    rig.report((3, 12), (4, 31))
    rig.report((0, 77), (1, 78))
    deltas = stream.pop_deltas()
    assert {choice: delta.tokens for choice, delta in deltas.items()} == {0: [12], 2: [31]}
    assert all(delta.first is None for delta in deltas.values()), "it was delivered before"
    assert stream.num_resumptions == rig.client.num_resumed_requests == 1


def test_lengths_of_outputs_that_ended_outlive_the_driver(rig: Rig) -> None:
    whole, aborted, failed = rig.submit(1, n=2), rig.submit(2), rig.submit(3)
    rig.report((0, 10), (1, 20), (2, 30), (3, 40))
    rig.report((0, 11), (1, 21), ends=(1,))
    rig.client.release(aborted)
    error = FinishedSequence(3, "error", error="not finite")
    rig.client.on_report(EngineOutputs(StepOutput([], [], [], [error]), BUSY))
    assert failed.pop_deltas()[0].end == error
    assert rig.client.totals.output_lengths.recent_lengths == {4: [2]}
    rig.die()
    rig.attach()
    rig.report((4, 12), ends=(4,))
    assert not whole.alive
    # The whole output counts, not its last part.
    assert rig.client.totals.output_lengths.recent_lengths == {4: [2, 3]}


def test_a_request_without_output_goes_as_it_was(rig: Rig) -> None:
    stream = rig.submit(1, 2, n=2, prompt_logprobs=0)
    (first,) = rig.sent
    rig.die()
    (again,) = rig.attach()
    assert isinstance(first, SubmitRequest)
    assert isinstance(again, SubmitRequest)
    assert (again.choices, again.outputs, again.sampling) == ([], [], first.sampling)
    rig.report((2, 10))
    assert stream.pop_deltas()[0].first == FirstToken(2, 3, 0.5)


def test_requests_return_in_order_of_arrival_with_their_age(rig: Rig) -> None:
    rig.submit(1)
    rig.now = 101.0
    ended = rig.submit(2)
    rig.submit(3)
    rig.report((1, 7), ends=(1,))
    rig.die(0, 1, 2)
    rig.now = 103.0
    rig.submit(4)
    rig.now = 104.5
    sent = rig.attach()
    assert rig.submitted() == [1, 3, 4]
    assert [each.age_seconds for each in sent if isinstance(each, SubmitRequest)] == [4.5, 3.5, 1.5]
    assert [each.seq for each in sent if isinstance(each, SubmitRequest)] == [3, 4, 5]
    assert not ended.alive
    assert rig.client.num_resumed_requests == 2


def test_what_is_aborted_while_parked_never_returns(rig: Rig) -> None:
    streams = [rig.submit(number, n=2, request_id=str(number)) for number in range(5)]
    rig.die()
    sent_before = len(rig.sent)
    rig.client.abort(streams[0], [1])
    rig.client.abort(streams[1], [0, 1])
    assert rig.client.abort_request("2") == 1
    rig.client.release(streams[3])
    assert len(rig.sent) == sent_before
    assert [delta.end.finish_reason for delta in streams[2].pop_deltas().values() if delta.end] == [
        "abort",
        "abort",
    ]
    assert rig.client.stats.waiting == 3
    sent = rig.attach()
    assert rig.submitted() == [0, 4]
    assert [each.choices for each in sent if isinstance(each, SubmitRequest)] == [[0], []]
    assert rig.client.num_requests == 4


def test_a_parked_request_that_cannot_be_sent_is_refused_at_once(rig: Rig) -> None:
    rig.die()
    bad: Any = 2**70
    with pytest.raises(OverflowError):
        rig.client.submit([1], SAMPLING, bad, [])
    with pytest.raises(TypeError):
        rig.client.submit([1], SequenceSamplingParams(seed=object()), 4, [])  # type: ignore[arg-type]
    assert (rig.attach(), rig.client.num_requests) == ([], 0)


def test_details_of_the_prompt_are_delivered_once(rig: Rig) -> None:
    stream = rig.submit(1, 2, logprobs=0, prompt_logprobs=0, embeds=True)
    prompt, token = TokenLogprobs(2, -1.0, 1, [], []), TokenLogprobs(7, -2.0, 1, [], [])

    def bring(seq: int, details: SampleDetails) -> None:
        rig.client.on_report(EngineOutputs(StepOutput([seq], [7], [], []), BUSY, [details]))

    bring(0, SampleDetails(0, token, [prompt], b"vector"))
    rig.die(0)
    (again,) = rig.attach()
    assert isinstance(again, SubmitRequest)
    assert (again.sampling.prompt_logprobs, again.sampling.embeds) == (None, False)
    assert again.sampling.logprobs == 0
    bring(1, SampleDetails(1, token, [prompt], b"vector"))
    bring(0, SampleDetails(0, token, [prompt], b"vector"))
    delta = stream.pop_deltas()[0]
    assert (delta.tokens, delta.logprobs) == ([7, 7], [token, token])
    assert (delta.prompt_logprobs, delta.embedding) == ([prompt], b"vector")


def test_a_pause_is_no_stall(rig: Rig) -> None:
    rig.submit(1)
    rig.now = 105.0
    assert rig.client.stalled_seconds == 5
    rig.die(0)
    rig.now = 500.0
    assert rig.client.stalled_seconds == 0
    rig.attach()
    assert rig.client.stalled_seconds == 0
    rig.now = 507.0
    assert rig.client.stalled_seconds == 7


def test_totals_continue_over_epochs(rig: Rig) -> None:
    client = rig.client
    rig.report((0, 1), stats=SchedulerStats(3, 2, 0.5, 1, steps=7, prefix_hits=4))
    client.on_report(StageUtilization(0, 7, 1.5))
    client.on_report(BubbleReport([0.5, 0.25], 2.0))
    client.on_report(StepCostReport(StepCostCoefficients(token=2.0)))
    rig.submit(1, n=3)
    rig.die()
    late = SchedulerStats(steps=9)
    rig.report(stats=late)
    client.on_report(StageUtilization(0, 9, 2.5))
    client.on_report(StepCostReport(StepCostCoefficients(token=9.0)))
    parked = SchedulerStats(waiting=3, steps=7, prefix_hits=4, waiting_tokens=1)
    assert client.stats == parked
    assert client.coefficients == StepCostCoefficients(token=2.0), "a new driver has none yet"
    assert client.totals.stage_loads == {0: StageUtilization(0, 7, 1.5)}
    rig.attach()
    rig.report(stats=SchedulerStats(running=3, steps=1))
    client.on_report(StageUtilization(0, 1, 0.25))
    client.on_report(BubbleReport([0.5, 0.25], 1.0))
    assert client.stats == SchedulerStats(running=3, steps=8, prefix_hits=4)
    assert client.totals.stage_loads == {0: StageUtilization(0, 8, 1.75)}
    assert client.totals.bubbles == BubbleReport([1.0, 0.5], 3.0)


def test_a_warm_up_runs_before_parked_requests_and_is_not_resumed() -> None:
    rig = Rig()
    waiting = rig.submit(5)
    stream = rig.client.submit_warm_up(rig.sent.append)
    assert [each.prompt for each in rig.sent if isinstance(each, SubmitRequest)] == [[0]]
    rig.die(0)
    end = stream.pop_deltas()[0].end
    assert end is not None
    assert (end.finish_reason, end.error) == ("error", "killed")
    again = rig.client.submit_warm_up(rig.sent.append)
    rig.report((1, 4), ends=(1,))
    assert again.pop_deltas()[0].tokens == [4]
    rig.attach()
    assert rig.submitted() == [5]
    assert (rig.client.num_requests, rig.client.num_resumed_requests) == (1, 0)
    assert waiting.alive == {0}


def test_requests_of_an_engine_that_does_not_return_end(rig: Rig) -> None:
    stream = rig.submit(1, n=2)
    rig.die(0)
    warm_up = rig.client.submit_warm_up(rig.sent.append)
    rig.client.reject_parked("not back in 60 s")
    deltas = stream.pop_deltas().values()
    assert [(d.end.error, d.error_kind) for d in deltas if d.end] == [
        ("not back in 60 s", "unavailable")
    ] * 2
    (seq,) = warm_up.entry.seqs.values()
    rig.report((seq, 7), ends=(seq,))
    assert warm_up.pop_deltas()[0].tokens == [7], "the engine goes on to recover"
    assert rig.attach() == []
    assert rig.submit(2).entry.seqs


# Requests that kill workers.


def kill_twice(rig: Rig, *names: int) -> None:
    """Let two deaths happen while requests of these names are computed."""
    for _ in range(2):
        seqs = {
            each.seq
            for each in rig.sent
            if isinstance(each, SubmitRequest) and each.prompt[0] in names
        }
        assert not rig.die(*seqs)
        rig.attach()


def test_one_death_parks_nobody(rig: Rig) -> None:
    for name in (1, 2, 3):
        rig.submit(name)
    assert not rig.die(0, 1, 2)
    rig.attach()
    assert rig.submitted() == [1, 2, 3]


def test_suspects_run_one_after_the_other_and_then_all(rig: Rig) -> None:
    streams = {name: rig.submit(name) for name in (1, 2, 3, 4)}
    kill_twice(rig, 2, 4)
    assert rig.submitted() == [2], "alone"
    rig.submit(5)
    rig.client.abort(streams[3], [0])
    assert rig.client.stats.waiting == 3
    (second,) = streams[2].entry.seqs.values()
    rig.report((second, 7))
    assert rig.sent[-1] == AbortSequences([second]), "it waits while the next suspect runs"
    assert rig.submitted() == [2]
    rig.report()
    assert rig.submitted() == [2], "a row of it is still in flight"
    rig.report(stats=SchedulerStats())
    assert rig.submitted() == [2, 4]
    (fourth,) = streams[4].entry.seqs.values()
    rig.report((fourth, 8))
    assert rig.submitted() == [2, 4, 1, 2, 5], "in order of arrival; the last suspect goes on"
    resumed = rig.sent[-2]
    assert isinstance(resumed, SubmitRequest)
    assert resumed.outputs == [[7]]
    rig.submit(6)
    assert rig.submitted()[-1] == 6


def test_who_kills_alone_ends_and_equal_requests_are_refused(rig: Rig) -> None:
    other = rig.submit(1)
    poison = rig.submit(2, seed=5)
    kill_twice(rig, 1, 2)
    assert rig.submitted() == [1]
    (seq,) = other.entry.seqs.values()
    rig.report((seq, 7), ends=(seq,), stats=SchedulerStats())
    assert rig.submitted() == [1, 2]
    (seq,) = poison.entry.seqs.values()
    assert rig.die(seq)
    delta = poison.pop_deltas()[0]
    assert delta.end is not None
    assert (delta.end.finish_reason, delta.error_kind) == ("error", "poison")
    assert "died" in delta.end.error
    for _ in range(2):
        with pytest.raises(PoisonRequestError, match="refused"):
            rig.submit(2, seed=6)
        rig.attach()
    assert rig.sent == []
    assert rig.submit(2, 3).alive
    assert rig.client.num_requests == 3


def test_those_who_have_come_far_wait_until_the_culprit_is_found(rig: Rig) -> None:
    old = [rig.submit(name) for name in (1, 2, 3)]
    rig.report((0, 7), (1, 8), (2, 9))
    poison = rig.submit(4)
    kill_twice(rig, 1, 2, 3, 4)
    assert rig.submitted() == [4], "it has no token"
    assert rig.die(*poison.entry.seqs.values())
    rig.attach()
    assert rig.submitted() == [1, 2, 3], "the deaths are explained"
    assert not rig.die(*[seq for each in old for seq in each.entry.seqs.values()])
    rig.attach()
    assert rig.submitted() == [1, 2, 3]


def test_a_poison_request_is_refused_while_parked_too(rig: Rig) -> None:
    rig.submit(2)
    kill_twice(rig, 2)
    assert rig.die(2)
    with pytest.raises(PoisonRequestError):
        rig.submit(2)


def test_deaths_while_nothing_is_computed_are_nobodys_fault(rig: Rig) -> None:
    stream = rig.submit(1)
    kill_twice(rig, 1)
    for _ in range(3):
        assert not rig.die()
        rig.attach()
        assert rig.submitted() == [1]
    assert stream.alive


def test_planned_restarts_are_nobodys_fault(rig: Rig) -> None:
    rig.submit(1)
    other = rig.submit(2)
    for _ in range(5):
        rig.client.detach("drained")
        rig.attach()
    assert rig.submitted() == [1, 2]
    assert other.alive


def test_a_new_token_makes_the_next_death_the_first(rig: Rig) -> None:
    stream = rig.submit(1, n=2)
    rig.submit(2)
    kill_twice(rig, 1)
    rig.report((stream.entry.seqs[1], 7))
    assert rig.submitted() == [1, 2]
    assert not rig.die(*stream.entry.seqs.values())
    rig.attach()
    assert rig.submitted() == [1, 2]


def test_a_last_token_of_one_choice_clears_the_others(rig: Rig) -> None:
    stream = rig.submit(1, n=2)
    kill_twice(rig, 1)
    first = stream.entry.seqs[0]
    rig.report((first, 7), ends=(first,))
    assert not rig.die(stream.entry.seqs[1])
    assert stream.alive == {1}


@pytest.mark.parametrize("how", ["abort", "release", "end"])
def test_a_suspect_that_leaves_lets_the_others_run(rig: Rig, how: str) -> None:
    suspect = rig.submit(1)
    rig.submit(2)
    kill_twice(rig, 1)
    assert rig.submitted() == [1]
    if how == "abort":
        rig.client.abort(suspect, [0])
    elif how == "release":
        rig.client.release(suspect)
    else:
        (seq,) = suspect.entry.seqs.values()
        rig.client.on_report(
            EngineOutputs(StepOutput([], [], [], [FinishedSequence(seq, "error")]), BUSY)
        )
    assert rig.submitted() == [1, 2]


def test_rows_of_a_suspect_that_was_taken_back_count(rig: Rig) -> None:
    """They may still be computed while the driver becomes idle."""
    first, second = rig.submit(1), rig.submit(2)
    kill_twice(rig, 1, 2)
    (seq,) = first.entry.seqs.values()
    rig.report((seq, 7))
    assert not rig.die(seq)
    rig.attach()
    assert rig.submitted() == [2], "the second is still a suspect"
    (other,) = second.entry.seqs.values()
    rig.report((other, 8))
    (seq,) = first.entry.seqs.values()
    assert not rig.die(seq)
    rig.attach()
    assert rig.submitted() == [1], "its death while it was taken back was the first"


def test_prompts_take_four_bytes_per_token(rig: Rig) -> None:
    stream = rig.submit(*range(1000))
    assert isinstance(stream.entry.prompt, array)
    assert len(stream.entry.prompt) * stream.entry.prompt.itemsize == 4000


def test_the_cost_of_computing_the_requests_again_is_predicted(rig: Rig) -> None:
    rig.attach()
    rig.submit(1, 2, 3)
    rig.submit(4, 5)
    assert rig.client.predict_recompute_seconds() == 0.0, "nothing has been measured"
    costs = StepCostCoefficients(step=0.5, token=2.0, pair=1.0)
    rig.client.on_report(StepCostReport(costs))
    # 3 tokens attend to 1 + 2 + 3 ones, 2 tokens to 1 + 2.
    assert rig.client.predict_recompute_seconds() == 2 * 0.5 + 5 * 2.0 + 9 * 1.0
    rig.report((0, 7))
    assert rig.client.predict_recompute_seconds() == 2 * 0.5 + 6 * 2.0 + 13 * 1.0
    rig.die()
    assert rig.client.predict_recompute_seconds() == 2 * 0.5 + 6 * 2.0 + 13 * 1.0, "parked"


def test_requests_carry_the_lengths_that_the_engine_predicts() -> None:
    rig = Rig()
    rig.client = EngineClient(lambda: rig.now, length_predictor="by-prompt")
    rig.attach()
    lengths = rig.client.output_lengths
    assert lengths is not None
    rig.submit(1, 2, 3)
    rig.report((0, 10))
    rig.report((0, 11), ends=(0,))
    # Aborted outputs say nothing about the length.
    rig.client.release(rig.submit(1, 2, 3))
    rig.submit(1, 2, 3)
    rig.report((2, 10))
    rig.die()
    rig.attach()
    routed = JournalEntry([1, 2, 3], SAMPLING, 8, [], 1, 0, "", rig.now)
    routed.predicted_output_tokens = 7
    rig.client.submit_entry(routed)
    predicted = [
        each.predicted_output_tokens for each in rig.sent if isinstance(each, SubmitRequest)
    ]
    # A request keeps its prediction after a death, and that of its router.
    assert predicted == [2, 7]
    rig.report((3, 11), (3, 12), ends=(3,))
    assert lengths.accuracy.num_outputs == 1
    (row,) = [row for row in lengths.accuracy.rows() if row.num_outputs]
    assert (row.num_right, row.mean_predicted_tokens, row.mean_tokens) == (1, 2, 3)
