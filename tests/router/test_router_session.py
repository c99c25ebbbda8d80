"""Requests of a router on an engine: their output under the router's wire ids, aborts and ends."""

import msgspec
import pytest

from gllm.messages.handoff import (
    FirstChunkComputed,
    HandOffSequence,
    KvPushStarted,
    KvSource,
    PrefetchKv,
    ReleaseKvHolds,
    RenewKvHolds,
)
from gllm.messages.kv_cache import KvCacheEvents, WatchKvCache
from gllm.messages.lifecycle import CommandDone, ResetPrefixCache
from gllm.messages.requests import AbortSequences
from gllm.messages.sampling import SequenceSamplingParams
from gllm.runtime.head.suspects import SUSPECT_DEATHS
from tests.support.engines.fake_driver import STOP, logprob_of, text_of
from tests.support.routing.links import Links, request, until


async def test_tokens_arrive_once_and_in_order_under_the_routers_ids(links: Links) -> None:
    router, engine, _ = await links.pair()
    requests = [
        request(1000, [1, 2], 9),
        request(2000, [3], 7, n=3),
        request(50, [4, 4], 6, choices=[1, 3], n=2),
    ]
    for each in requests:
        router.link().send(each)
    await until(lambda: engine.client.num_requests == 3)
    while engine.driver.sequences:
        engine.step()
    await until(lambda: len(router.ends()) == 6)
    expected = {1000: text_of([1, 2], 0, 9)}
    expected |= {2000 + choice: text_of([3], choice, 7) for choice in range(3)}
    expected |= {50: text_of([4, 4], 1, 6), 51: text_of([4, 4], 3, 6)}
    assert router.tokens() == expected
    ends = {seq: ("stop" if text[-1] == STOP else "length", "") for seq, text in expected.items()}
    assert router.ends() == ends
    firsts = [first.seq for each in router.outputs for first in each.outcome.first_tokens]
    assert sorted(firsts) == sorted(expected)
    assert engine.client.num_requests == 0


async def test_the_output_of_a_step_is_one_message(links: Links) -> None:
    router, engine, _ = await links.pair()
    for number in range(4):
        router.link().send(request(10 * number, [number, 1], 30))
    await until(lambda: engine.client.num_requests == 4)
    while engine.driver.steps < 5:
        engine.step(batch=2)
    await until(lambda: sum(map(len, router.tokens().values())) >= 8)
    assert len(router.outputs) < 5, "steps of one turn of the event loop share a message"
    router.messages.clear()
    before = engine.driver.steps
    while engine.driver.sequences:
        engine.step()
        steps = engine.driver.steps
        await until(lambda: router.outputs and router.outputs[-1].stats.steps >= steps)  # noqa: B023
    assert len(router.outputs) == engine.driver.steps - before


async def test_a_request_continues_after_the_tokens_that_another_engine_gave(links: Links) -> None:
    router, engine, _ = await links.pair()
    text = text_of([8, 1], 2, 8)
    router.link().send(request(7, [8, 1], 8, choices=[2], outputs=[text[:3]], age_seconds=4.0))
    await until(lambda: engine.driver.sequences)
    assert [each.request.age_seconds >= 4 for each in engine.driver.sequences.values()] == [True]
    while engine.driver.sequences:
        engine.step()
    await until(lambda: 7 in router.ends())
    assert router.tokens() == {7: text[3:]}


async def test_details_of_tokens_pass_through(links: Links) -> None:
    router, engine, _ = await links.pair()
    sampling = SequenceSamplingParams(logprobs=1, prompt_logprobs=1, embeds=True)
    router.link().send(request(3, [5, 6, 7], 6, sampling=sampling))
    await until(lambda: engine.client.num_requests)
    while engine.driver.sequences:
        engine.step(batch=2)
    await until(lambda: 3 in router.ends())
    details = [row for each in router.outputs for row in each.details]
    assert [row.sampled for row in details] == [logprob_of(t) for t in router.tokens()[3]]
    assert [row.prompt_logprobs for row in details if row.prompt_logprobs] == [
        [logprob_of(6), logprob_of(7)]
    ]
    assert [row.embedding for row in details if row.embedding] == [b"vector"]


async def test_aborts_of_choices_and_of_ids_that_have_ended(links: Links) -> None:
    router, engine, _ = await links.pair()
    router.link().send(request(1, [9, 9, 1], 400, n=2))
    await until(lambda: len(engine.driver.sequences) == 2)
    router.link().send(AbortSequences([2, 77]))
    await until(lambda: len(engine.driver.sequences) == 1)
    assert engine.client.num_requests == 1
    router.link().send(AbortSequences([1, 2]))
    await until(lambda: not engine.driver.sequences)
    assert engine.client.num_requests == 0
    assert router.ends() == {}


async def test_requests_end_with_the_session_of_their_router(links: Links) -> None:
    router, engine, attachment = await links.pair()
    for seq in range(3):
        router.link().send(request(seq, [seq], 400))
    await until(lambda: len(engine.driver.sequences) == 3)
    engine.step()
    await router.links.stop()
    await until(lambda: not engine.driver.sequences)
    assert engine.client.num_requests == 0
    assert attachment.routers == []


async def test_requests_that_cannot_run_are_answered(links: Links) -> None:
    router, engine, _ = await links.pair()
    router.link().send(request(1, [-5]))
    await until(lambda: 1 in router.ends())
    assert "`prompt`" in router.errors()[1]
    router.link().send(request(20, [1], n=2, choices=[3, 1]))
    await until(lambda: 21 in router.ends())
    # Its sampling parameters are those of the router's request.
    poison = engine.client.submit([7], SequenceSamplingParams(), 8, [])
    for _ in range(SUSPECT_DEATHS + 1):
        engine.client.on_death(list(poison.entry.seqs.values()))
        engine.client.detach("killed")
        engine.client.attach(engine.driver.send)
    engine.client.release(poison)
    router.link().send(request(30, [7]))
    await until(lambda: 30 in router.ends())
    assert router.ends() == {
        1: ("error", ""),
        20: ("error", ""),
        21: ("error", ""),
        30: ("error", "poison"),
    }
    assert engine.client.num_requests == 0
    assert router.lost == []


async def test_what_an_engine_cannot_finish_goes_elsewhere(links: Links) -> None:
    router, engine, attachment = await links.pair()
    router.link().send(request(1, [1], 400))
    await until(lambda: engine.driver.sequences)
    await attachment.drain()
    await until(lambda: router.link().is_leaving)
    router.link().send(request(2, [2]))
    await until(lambda: 2 in router.ends())
    assert router.ends() == {2: ("error", "unavailable")}
    engine.state, engine.state_cause = "dead", "no memory"
    engine.client.fail_all("no memory")
    await until(lambda: 1 in router.ends())
    assert router.ends()[1] == ("error", "unavailable")
    assert "no memory" in router.errors()[1]


async def test_an_abort_of_all_requests_at_the_engine_gives_those_of_routers_back(
    links: Links,
) -> None:
    """As POST /abort with abort_all, and /sleep?mode=abort, do it."""
    router, engine, _ = await links.pair()
    own = engine.client.submit([7], SequenceSamplingParams(), 8, [], request_id="own")
    router.link().send(request(1, [1], 400, request_id="named"))
    router.link().send(request(2, [2], 400, n=2))
    await until(lambda: len(engine.driver.sequences) == 4)
    assert engine.client.abort_request("named") == 1
    await until(lambda: 1 in router.ends())
    assert engine.client.abort_request(None) == 2
    await until(lambda: len(router.ends()) == 3)
    unavailable = ("error", "unavailable")
    assert router.ends() == {1: ("abort", ""), 2: unavailable, 3: unavailable}
    end = own.pop_deltas()[0].end
    assert end is not None
    assert (end.finish_reason, end.error) == ("abort", "")
    engine.client.release(own)
    assert engine.client.num_requests == 0


async def test_requests_above_the_engines_limit_go_elsewhere(links: Links) -> None:
    router = await links.router(hub="127.0.0.1:0")
    engine, _ = await links.engine(dial=(router.address,), max_num_queued_requests=2)
    await until(lambda: router.attached)
    own = engine.client.submit([7], SequenceSamplingParams(), 400, [])
    router.link().send(request(1, [1], 400))
    router.link().send(request(2, [2], 400))
    await until(lambda: router.ends())
    assert router.ends() == {2: ("error", "unavailable")}
    assert router.errors()[2] == "the engine is full: 2 requests are queued"
    engine.client.release(own)
    router.link().send(request(3, [3], 400))
    await until(lambda: len(engine.driver.sequences) == 2)
    assert len(router.ends()) == 1


async def test_requests_wait_for_a_recovery_until_it_is_overdue(links: Links) -> None:
    router, engine, _ = await links.pair()
    engine.client.detach("killed")
    engine.change("recovering", "stage 1 was killed")
    router.link().send(request(1, [1]))
    await until(lambda: engine.client.num_requests)
    engine.is_recovery_overdue = True
    router.link().send(request(2, [1]))
    await until(lambda: 2 in router.ends())
    assert router.ends() == {2: ("error", "unavailable")}
    assert router.errors()[2] == "stage 1 was killed"


async def test_a_wire_id_in_use_ends_the_session(links: Links) -> None:
    router, engine, _ = await links.pair()
    router.link().send(request(1, [1], 400, n=3))
    router.link().send(request(3, [1], 400))
    await until(lambda: router.lost)
    await until(lambda: not engine.driver.sequences)


async def test_kv_events_and_commands(links: Links) -> None:
    router, engine, _ = await links.pair()
    watched: list[WatchKvCache] = []
    engine.kv_events.attach(watched.append)
    router.link().send(WatchKvCache(True))
    await until(lambda: watched)
    engine.kv_events.on_events(KvCacheEvents(0, [], [], True))
    await until(lambda: any(isinstance(each, KvCacheEvents) for each in router.messages))
    engine.reset_error = "the engine is recovering"
    router.link().send(ResetPrefixCache(12))
    await until(lambda: CommandDone(12, 0, "the engine is recovering") in router.messages)
    await router.links.stop()
    await until(lambda: watched[-1] == WatchKvCache(False))


async def test_holds_of_a_router_end_with_its_session(links: Links) -> None:
    router, engine, _ = await links.pair()
    for ticket in (5, 6):
        message = request(10 * ticket, [1, 2], 1)
        router.link().send(msgspec.structs.replace(message, kv_ticket=ticket))
    router.link().send(RenewKvHolds([5, 6]))
    router.link().send(ReleaseKvHolds([5]))
    await until(lambda: len(engine.kv_commands) == 2)
    assert engine.kv_commands == [RenewKvHolds([5, 6]), ReleaseKvHolds([5])]
    await router.links.stop()
    await until(lambda: len(engine.kv_commands) == 3)
    assert engine.kv_commands[2] == ReleaseKvHolds([6])


def prefetch(ticket: int) -> PrefetchKv:
    return PrefetchKv(KvSource("other", 1, ticket, 2, b"endpoint"), [1, 2], 8)


async def test_prefetches_of_a_router_end_with_its_session(links: Links) -> None:
    router, engine, _ = await links.pair()
    for ticket in (5, 6, 7):
        router.link().send(prefetch(ticket))
    # This one has become a request.
    message = request(1, [1, 2], 8)
    router.link().send(msgspec.structs.replace(message, kv_source=prefetch(6).source))
    router.link().send(ReleaseKvHolds([5]))
    await until(lambda: len(engine.kv_commands) == 4)
    assert engine.kv_commands[:3] == [prefetch(5), prefetch(6), prefetch(7)]
    await router.links.stop()
    await until(lambda: len(engine.kv_commands) == 5)
    assert engine.kv_commands[4] == ReleaseKvHolds([7])


async def test_a_running_request_is_handed_off_under_the_engines_id(links: Links) -> None:
    router, engine, _ = await links.pair()
    router.link().send(request(40, [1, 2], 8))
    router.link().send(HandOffSequence(40, 5))
    router.link().send(HandOffSequence(41, 6))
    router.link().send(RenewKvHolds([5]))
    await until(lambda: len(engine.kv_commands) == 2)
    (seq,) = (seq for stream in engine.client._streams for seq in stream.entry.seqs.values())
    # There is no request 41 any more.
    assert engine.kv_commands == [HandOffSequence(seq, 5), RenewKvHolds([5])]
    await router.links.stop()
    await until(lambda: len(engine.kv_commands) == 3)
    assert engine.kv_commands[2] == ReleaseKvHolds([5])


async def test_an_engine_that_takes_no_requests_prefetches_nothing(links: Links) -> None:
    router, engine, attachment = await links.pair()
    await attachment.drain()
    router.link().send(prefetch(5))
    router.link().send(RenewKvHolds([5]))
    await until(lambda: engine.kv_commands)
    assert engine.kv_commands == [RenewKvHolds([5])]


async def test_a_router_learns_of_the_pushes_of_its_requests(links: Links) -> None:
    router, engine, attachment = await links.pair()
    message = request(1, [1, 2], 1)
    router.link().send(msgspec.structs.replace(message, kv_ticket=5))
    await until(lambda: engine.driver.sequences)
    for ticket in (4, 5):
        attachment.on_prefill(KvPushStarted(ticket))
    await until(lambda: KvPushStarted(5) in router.messages)
    assert KvPushStarted(4) not in router.messages


@pytest.mark.parametrize("needs_first_chunks", [True, False])
async def test_a_router_that_needs_first_chunks_learns_of_those_of_its_requests(
    links: Links, needs_first_chunks: bool
) -> None:
    router = await links.router(hub="127.0.0.1:0", needs_first_chunks=needs_first_chunks)
    engine, attachment = await links.engine(dial=(router.address,))
    await until(lambda: router.attached)
    message = request(1, [1, 2], 1, kv_ticket=5, reports_first_chunk=not needs_first_chunks)
    router.link().send(message)
    await until(lambda: engine.driver.sequences)
    (sequence,) = engine.driver.sequences.values()
    # The greeting counts, not what a router says about one request.
    assert sequence.request.reports_first_chunk == needs_first_chunks
    for ticket in (4, 5):
        attachment.on_prefill(FirstChunkComputed(ticket))
    attachment.on_prefill(KvPushStarted(5))
    await until(lambda: KvPushStarted(5) in router.messages)
    reports = [each for each in router.messages if isinstance(each, FirstChunkComputed)]
    assert reports == [FirstChunkComputed(5)]
