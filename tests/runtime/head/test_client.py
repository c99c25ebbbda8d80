"""Requests under way, as the parent sees them."""

import asyncio
import time
from typing import Any

from gllm.messages.requests import AbortSequences, EngineOutputs, SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.runtime.head.client import EngineClient
from gllm.scheduler.plan import FinishedSequence, FirstToken, SchedulerStats, StepOutput


def connected(clock=time.monotonic):
    client, sent = EngineClient(clock), list[Any]()
    client.attach(sent.append)
    return client, sent


def brings(client, seq, *tokens, ends=()):
    for token in tokens:
        client.on_report(
            EngineOutputs(
                StepOutput([seq], [token], [FirstToken(seq, 1, 0.5)], []), SchedulerStats()
            )
        )
    client.on_report(EngineOutputs(StepOutput([], [], [], list(ends)), SchedulerStats()))


async def test_a_slow_reader_gets_all_at_once():
    client, sent = connected()
    stream = client.submit([5], SequenceSamplingParams(), 8, [])
    assert isinstance(sent[0], SubmitRequest)
    brings(client, 0, 1, 2, 3)
    assert stream.pop_deltas()[0].tokens == [1, 2, 3]
    brings(client, 0, 4, ends=[FinishedSequence(0, "length")])
    piece = stream.pop_deltas()[0]
    assert (piece.tokens, piece.end.finish_reason) == ([4], "length")


async def test_a_waiting_reader_is_woken_by_what_comes():
    client, _ = connected()
    stream = client.submit([5], SequenceSamplingParams(), 8, [])
    waiting = asyncio.ensure_future(stream.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    brings(client, 0, 7)
    await waiting
    assert stream.pop_deltas()[0].tokens == [7]
    brings(client, 0, 8)
    await stream.wait()
    assert stream.pop_deltas()[0].tokens == [8]


async def test_a_reader_that_gave_up_keeps_nothing_from_the_next():
    client, _ = connected()
    stream = client.submit([5], SequenceSamplingParams(), 8, [])
    waiting = asyncio.ensure_future(stream.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    brings(client, 0, 7)
    assert stream.pop_deltas()[0].tokens == [7]


async def test_a_listener_is_told_once_when_all_of_a_step_is_there():
    client, _ = connected()
    streams = [client.submit([5], SequenceSamplingParams(), 8, [], n=2) for _ in range(2)]
    heard = []
    for stream in streams:
        stream.set_listener(lambda stream=stream: heard.append(stream.pop_deltas()))
    step = StepOutput(
        [0, 1, 2, 3], [10, 11, 12, 13], [FirstToken(0, 1, 0.5)], [FinishedSequence(3, "length")]
    )
    client.on_report(EngineOutputs(step, SchedulerStats()))
    assert [{choice: p.tokens for choice, p in taken.items()} for taken in heard] == [
        {0: [10], 1: [11]},
        {0: [12], 1: [13]},
    ]
    assert heard[0][0].first is not None
    assert heard[1][1].end.finish_reason == "length"


async def test_who_listens_is_not_told_again_before_taking():
    client, _ = connected()
    stream = client.submit([5], SequenceSamplingParams(), 8, [])
    heard = []
    stream.set_listener(lambda: heard.append(len(stream.deltas[0].tokens)))
    brings(client, 0, 1, 2, 3)
    assert heard == [1]
    assert stream.pop_deltas()[0].tokens == [1, 2, 3]
    brings(client, 0, 4)
    assert heard == [1, 1]


async def test_a_listener_may_end_its_sequence_and_others():
    """A stop string ends a sequence within the step that brings it."""
    client, sent = connected()
    first, second = [client.submit([5], SequenceSamplingParams(), 8, []) for _ in range(2)]
    first.set_listener(lambda: [client.abort(each, [0]) for each in (first, second)])
    heard = []
    second.set_listener(lambda: heard.append(second.pop_deltas()[0].tokens))
    client.on_report(EngineOutputs(StepOutput([0, 1], [10, 11], [], []), SchedulerStats()))
    assert sent[-2:] == [AbortSequences([0]), AbortSequences([1])]
    assert heard == [[11]]


async def test_nobody_is_told_of_what_another_listener_took():
    client, _ = connected()
    streams = [client.submit([5], SequenceSamplingParams(), 8, []) for _ in range(3)]
    heard = []
    for stream in streams:
        stream.set_listener(lambda: heard.append([each.pop_deltas()[0].tokens for each in streams]))
    client.on_report(EngineOutputs(StepOutput([0, 1, 2], [10, 11, 12], [], []), SchedulerStats()))
    assert heard == [[[10], [11], [12]]]


async def test_who_begins_to_listen_late_is_told_at_once():
    client, _ = connected()
    stream = client.submit([5], SequenceSamplingParams(), 8, [])
    heard = []
    stream.set_listener(lambda: heard.append("nothing is there"))
    assert heard == []
    brings(client, 0, 7)
    stream.set_listener(lambda: heard.append(stream.pop_deltas()[0].tokens))
    assert heard == ["nothing is there", [7]]


async def test_the_end_of_the_engine_is_news():
    client, _ = connected()
    stream = client.submit([5], SequenceSamplingParams(), 8, [])
    heard = []
    stream.set_listener(lambda: heard.append(stream.pop_deltas()[0].end))
    client.fail_all("gone")
    assert [(end.finish_reason, end.error) for end in heard] == [("error", "gone")]


async def test_requests_end_by_their_id():
    client, sent = connected()
    mine = client.submit([5], SequenceSamplingParams(), 8, [], n=2, request_id="mine")
    other = client.submit([5], SequenceSamplingParams(), 8, [], request_id="other")
    brings(client, 0, 7)
    assert client.abort_request("nobody") == 0
    assert client.abort_request("mine") == 1
    assert sent[-1] == AbortSequences([0, 1])
    pieces = mine.pop_deltas()
    assert pieces[0].tokens == [7]
    assert [pieces[choice].end.finish_reason for choice in (0, 1)] == ["abort", "abort"]
    assert client.abort_request(None) == 1
    assert other.pop_deltas()[0].end.finish_reason == "abort"
    client.release(mine)
    client.release(other)
    assert client.num_requests == 0
    assert len(sent) == 4, "what has ended is not aborted again"


async def test_statistics_alone_are_no_progress():
    """New requests must not hide that the stages have stopped."""
    now = 100.0
    client, _ = connected(lambda: now)
    client.submit([5], SequenceSamplingParams(), 8, [])
    now = 130.0
    client.on_report(EngineOutputs(StepOutput([], [], [], []), SchedulerStats(waiting=1)))
    assert (client.stats.waiting, client.stalled_seconds) == (1, 30.0)
    client.on_report(EngineOutputs(StepOutput([], [], [], [], 5), SchedulerStats(running=1)))
    assert (client.stats.running, client.stalled_seconds) == (1, 0.0)


async def test_nothing_runs_or_waits_once_the_engine_is_gone():
    """Counters stay: they must not fall."""
    client, _ = connected()
    client.on_report(
        EngineOutputs(
            StepOutput([], [], [], [], 5), SchedulerStats(3, 2, 0.5, 1, steps=7, decode_tokens=9)
        )
    )
    client.fail_all("gone")
    assert client.stats == SchedulerStats(steps=7, decode_tokens=9)


async def test_work_without_a_finished_step_is_a_stall_and_idle_time_is_none():
    clock = [100.0]
    client, _ = connected(lambda: clock[0])
    clock[0] += 1000
    assert client.stalled_seconds == 0
    stream = client.submit([5], SequenceSamplingParams(), 8, [])
    assert client.stalled_seconds == 0, "it was idle before"
    clock[0] += 7
    assert client.stalled_seconds == 7
    other = client.submit([6], SequenceSamplingParams(), 8, [])
    assert client.stalled_seconds == 7, "another request is no progress"
    client.on_report(EngineOutputs(StepOutput([0], [9], [], [], 1), SchedulerStats()))
    assert client.stalled_seconds == 0
    clock[0] += 3
    client.abort(other, [0])
    client.release(stream)
    assert client.stalled_seconds == 0


async def test_steps_are_counted_by_their_size():
    client, _ = connected()
    for tokens in (1, 3, 4, 5, 0):
        client.on_report(EngineOutputs(StepOutput([], [], [], [], tokens), SchedulerStats()))
    assert client.step_sizes == {1: 1, 4: 2, 8: 1}


class CountedId(str):
    """Request id that counts its comparisons."""

    num_comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedId.num_comparisons += 1
        return super().__eq__(other)


async def test_requests_are_aborted_by_id_in_linear_time():
    client, sent = connected()
    num_requests = 300
    for number in range(num_requests):
        client.submit([5], SequenceSamplingParams(), 8, [], request_id=CountedId(number))
    assert [client.abort_request(CountedId(n)) for n in range(num_requests)] == [1] * num_requests
    aborted = [message for message in sent if isinstance(message, AbortSequences)]
    assert [message.seqs for message in aborted] == [[seq] for seq in range(num_requests)]
    assert CountedId.num_comparisons < 10 * num_requests
    assert client.abort_request(CountedId(0)) == 0
