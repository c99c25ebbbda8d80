"""A fleet: engines come, drain, recover and die; requests go where they can run."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import msgspec
import pytest

from gllm.config.router import RouterConfig
from gllm.engine.fleet_control import UnknownEngineError
from gllm.engine.interface import EngineUnavailableError, OverloadedError
from gllm.messages.fleet import DrainEngine, EngineReport
from gllm.messages.kv_cache import KvCacheEvents, WatchKvCache
from gllm.messages.lifecycle import CommandDone, ResetPrefixCache
from gllm.messages.requests import EngineOutputs, SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.options.slo import Slo
from gllm.router.fleet import Fleet
from gllm.routing.policy import RoutingPolicy
from gllm.routing.state import EngineSnapshot, RoutingRequest
from gllm.runtime.head.kv_events import KvEventSource
from gllm.runtime.head.request_stream import RequestStream
from gllm.scheduler.plan import FinishedSequence, FirstToken, SchedulerStats, StepOutput
from gllm.scheduler.step_cost import StepCostCoefficients
from tests.support.engines.kv_driver import TOKEN, KvDriver
from tests.support.routing.scripted_links import ANNOUNCE, ScriptedLink, ScriptedLinks

GREEDY = SequenceSamplingParams(temperature=0)
AGES = 1e7
"""A time limit that a test never reaches."""


class Rig:
    """A fleet and the test's end of its links."""

    links: Any

    def __init__(
        self,
        *,
        routing: RoutingPolicy | None = None,
        pair_policy: Any = None,
        clock: Callable[[], float] | None = None,
        **options: Any,
    ) -> None:
        """Create a fleet without engines.

        Args:
            routing: chooses the engines; None for the policy of the options.
            pair_policy: of the fleet.
            clock: of the fleet; None for the real one and the seconds in `passed`.
            options: of the router.
        """
        self.passed = 0.0
        """Seconds by which the test has moved the clock on."""
        self.fleet = Fleet(
            RouterConfig(**{"policy": "round-robin", **options}),
            "hash",
            64,
            self._create_links,
            pair_policy,
            routing,
            clock or (lambda: time.monotonic() + self.passed),
        )

    def _create_links(self, *args: Any) -> Any:
        self.links = ScriptedLinks(*args)
        return self.links

    def attach(self, name: str, state: str = "ready", **facts: Any) -> ScriptedLink:
        link: ScriptedLink = self.links.attach(
            msgspec.structs.replace(ANNOUNCE, name=name, **facts), state
        )
        return link

    def submit(self, *prompt: int) -> RequestStream:
        return self.fleet.client.submit(list(prompt or (1, 2, 3)), GREEDY, 8, [])


class FailingPolicy(RoutingPolicy):
    """A policy with a bug."""

    def choose(self, request: RoutingRequest, engines: Sequence[EngineSnapshot]) -> str:
        raise ZeroDivisionError("figures that nobody expects")


def test_a_policy_that_fails_loses_no_request(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(routing=FailingPolicy(Random(0)))
    busy, idle = rig.attach("busy"), rig.attach("idle")
    costs = StepCostCoefficients(0.001, 0.001)
    odd = SchedulerStats(running=3, waiting_tokens=-(2**63), kv_usage=float("nan"))
    rig.links.on_message(busy, EngineReport("ready", "", odd, costs))
    stream = rig.submit(1, 2)
    assert stream.alive
    assert [message.prompt for message in idle.sent if isinstance(message, SubmitRequest)] == [
        [1, 2]
    ]
    assert "the routing policy failed" in caplog.text


def test_deferred_requests_wait_at_the_router_until_an_engine_has_room() -> None:
    rig = Rig(policy="deferred", park_timeout=60.0)
    a = rig.attach("a", max_num_seqs=2)
    streams = [rig.submit(number, 2) for number in range(5)]
    assert [each.prompt[0] for each in a.requests] == [0, 1]
    assert (rig.fleet.totals().num_parked, rig.fleet.totals().held_requests) == (3, 3)
    # A step without an end makes no room; an end makes room for one.
    for token in (7, 8):
        step = StepOutput([0], [token], [FirstToken(0, 0, 0.0)], [])
        rig.links.on_message(a, EngineOutputs(step, SchedulerStats(running=2)))
    assert len(a.requests) == 2
    rig.passed = 100.0
    rig.fleet.on_tick()
    assert all(stream.alive for stream in streams), "they wait in a queue, not for an engine"
    end = StepOutput([], [], [], [FinishedSequence(0, "stop")])
    rig.links.on_message(a, EngineOutputs(end, SchedulerStats(running=1)))
    assert [each.prompt[0] for each in a.requests] == [0, 1, 2]
    a.leave()
    b = rig.attach("b", max_num_seqs=4)
    # What a has had goes on at once, the others as far as there is room.
    assert [each.prompt[0] for each in b.requests] == [1, 2, 3, 4]
    assert (read(streams[0]), rig.fleet.totals().num_parked) == ([7, 8], 0)


def test_without_an_engine_deferred_requests_end_in_time() -> None:
    rig = Rig(policy="deferred", park_timeout=60.0)
    stream = rig.submit()
    rig.passed = 61.0
    rig.fleet.on_tick()
    assert error_kind(stream) == "unavailable"


async def test_a_heartbeat_places_the_requests_that_came_in_it() -> None:
    rig = Rig(policy="aladdin", placement_heartbeat=0.05)
    a = rig.attach("a")
    for prompt in ((1,), (2, 2), (3, 3, 3)):
        rig.submit(*prompt)
    assert [each.prompt[0] for each in a.requests] == [1]
    for _ in range(200):
        if len(a.requests) == 3:
            break
        await asyncio.sleep(0.01)
    assert [each.prompt[0] for each in a.requests] == [1, 3, 2]
    totals = rig.fleet.totals()
    assert (totals.held_requests, totals.placement_heartbeat, totals.num_parked) == (2, 0.05, 0)
    await rig.fleet.stop()


def test_a_heartbeat_needs_a_policy_that_has_one() -> None:
    with pytest.raises(ValueError, match=r"policy predict places requests at their arrival: set"):
        RouterConfig(placement_heartbeat=0.5)
    with pytest.raises(ValueError, match="placement_heartbeat"):
        RouterConfig(policy="aladdin", placement_heartbeat=-1.0)


def test_a_limit_of_the_first_token_is_less_by_the_time_that_has_passed() -> None:
    slo = Slo(2.0, 0.1)
    assert slo.remaining(0.5, False) == Slo(1.5, 0.1)
    assert slo.remaining(2.0, False) == slo.remaining(0.5, True) == Slo(None, 0.1)
    assert Slo(None, 0.1).remaining(9.0, False) == Slo(None, 0.1)


def test_engines_are_loaded_with_the_limits_of_their_requests() -> None:
    rig = Rig(policy="aladdin")
    rig.attach("a")
    limits = [Slo(0.5, 0.1), None, Slo(None, 0.2)]
    for slo in limits:
        rig.fleet.client.submit([1, 2], GREEDY, 8, [], slo=slo)
    (record,) = rig.fleet._dispatcher.records.values()
    first, *others = (each.slo for each in record.snapshot(now=0.0).ongoing)
    assert others == limits[1:]
    assert first is not None
    assert first.tpot_seconds == 0.1
    # Less by the time since its arrival.
    assert 0.1 < (first.ttft_seconds or 0.0) <= 0.5


def read(stream: RequestStream) -> list[int]:
    """Tokens of a request's only choice since the last call."""
    return [token for delta in stream.pop_deltas().values() for token in delta.tokens]


def error_kind(stream: RequestStream) -> str:
    """Kind of the error with which a request's only choice has ended."""
    (delta,) = stream.pop_deltas().values()
    assert delta.end is not None
    return delta.error_kind


def test_a_request_goes_on_where_the_tokens_are_left() -> None:
    rig = Rig()
    a = rig.attach("a")
    stream = rig.submit(1, 2, 3)
    a.answer(a.requests[0], 10, 11)
    assert read(stream) == [10, 11]
    b = rig.attach("b")
    assert rig.fleet.state == "ready"
    a.leave()
    (request,) = b.requests
    assert (request.prompt, request.outputs) == ([1, 2, 3], [[10, 11]])
    b.answer(request, 12, reason="length")
    assert read(stream) == [12]
    totals = rig.fleet.totals()
    assert (totals.migrations, totals.lost_engines) == ({"lost": 1}, {"lost": 1})


def test_expected_lengths_are_learned_from_outputs_that_engines_finish() -> None:
    rig = Rig()
    a = rig.attach("a")
    moved, failed = rig.submit(), rig.submit()
    assert [each.predicted_output_tokens for each in a.requests] == [0, 0]
    a.answer(a.requests[0], 10, 11)
    a.answer(a.requests[1], 5, reason="error")
    b = rig.attach("b")
    a.leave()
    b.answer(b.requests[-1], 12, reason="length")
    assert read(moved) == [10, 11, 12]
    assert failed.alive == set()
    rig.submit()
    assert b.requests[-1].predicted_output_tokens == 3


def test_requests_park_while_no_engine_takes_them() -> None:
    rig = Rig(park_timeout=AGES)
    assert rig.fleet.state == "recovering"
    assert rig.fleet.accepts_requests
    with pytest.raises(EngineUnavailableError, match="no engine is attached"):
        rig.fleet.check_ready()
    stream = rig.submit()
    assert (rig.fleet.totals().num_parked, rig.fleet.status().stats.waiting) == (1, 1)
    a = rig.attach("a", "loading")
    assert not a.requests
    with pytest.raises(EngineUnavailableError, match="a is loading"):
        rig.fleet.check_ready()
    a.change("ready")
    assert rig.fleet.state == "ready"
    a.answer(a.requests[0], 5, reason="stop")
    assert read(stream) == [5]


def test_requests_that_park_too_long_end() -> None:
    rig = Rig(park_timeout=60.0)
    stream = rig.submit()
    rig.passed = 59.0
    rig.fleet.on_tick()
    assert stream.alive
    rig.passed = 60.1
    rig.fleet.on_tick()
    assert error_kind(stream) == "unavailable"
    assert not rig.fleet.accepts_requests
    with pytest.raises(EngineUnavailableError) as refused:
        rig.fleet.check_ready()
    assert refused.value.dropped_reason == "rejected-no-endpoints"
    assert refused.value.retry_after >= 1


@pytest.mark.parametrize(
    ("facts", "cause"),
    [({"model_hash": "other"}, "files differ"), ({"max_model_len": 32}, "--max-model-len")],
)
def test_engines_that_do_not_fit_are_refused(facts: dict[str, Any], cause: str) -> None:
    rig = Rig()
    link = rig.attach("a", **facts)
    assert cause in link.refusal
    assert rig.fleet.engines() == []
    assert rig.fleet.totals().refused_engines == 1
    # Messages that were under way.
    rig.links.on_message(link, EngineReport("ready", "", SchedulerStats()))
    rig.submit()
    assert not link.requests


def test_a_drained_engine_gets_nothing_new() -> None:
    rig = Rig()
    a, b = rig.attach("a"), rig.attach("b")
    streams = [rig.submit() for _ in range(2)]
    assert (len(a.requests), len(b.requests)) == (1, 1)
    assert rig.fleet.drain_engine("a", migrates=False) == 1
    assert a.sent[-1] == DrainEngine(True, is_held=True)
    rig.submit()
    rig.submit()
    assert (len(a.requests), len(b.requests)) == (1, 3)
    a.change("draining")
    a.answer(a.requests[0], 7, reason="stop")
    assert sorted(read(stream) for stream in streams) == [[], [7]]
    a.leave("it has ended")
    assert rig.fleet.totals().lost_engines == {"drained": 1}
    with pytest.raises(UnknownEngineError):
        rig.fleet.drain_engine("a", migrates=False)


def test_drain_with_migration_and_undrain() -> None:
    rig = Rig()
    a, b = rig.attach("a"), rig.attach("b")
    rig.submit()
    (request,) = a.requests
    a.answer(request, 7)
    assert rig.fleet.drain_engine("a", migrates=True) == 0
    assert a.aborted == [request.seq]
    assert b.requests[-1].outputs == [[7]]
    a.change("draining")
    rig.fleet.undrain_engine("a")
    assert a.sent[-1] == DrainEngine(False)
    a.change("ready")
    rig.submit()
    rig.submit()
    assert len(a.requests) == 2


@pytest.mark.parametrize(("patience", "num_moved"), [(0.0, 1), (AGES, 0)])
def test_a_long_recovery_is_not_waited_for(patience: float, num_moved: int) -> None:
    rig = Rig(recovery_patience=patience)
    a = rig.attach("a")
    rig.submit()
    b = rig.attach("b")
    a.change("recovering", "killed")
    rig.fleet.on_tick()
    assert len(b.requests) == num_moved
    assert rig.fleet.engines()[0].cause == "killed"


def test_every_engine_recovers() -> None:
    """Requests stay where they are, because nobody else is better."""
    rig = Rig(recovery_patience=0.0)
    a = rig.attach("a")
    rig.submit()
    a.change("recovering", "killed")
    assert rig.fleet.state == "recovering"
    assert "a is recovering" in rig.fleet.status().recovery_cause
    rig.fleet.on_tick()
    assert not a.aborted
    a.change("ready")
    assert rig.fleet.state == "ready"


def test_counters_never_count_down() -> None:
    rig = Rig()
    a, b = rig.attach("a"), rig.attach("b")
    for link, num_tokens in ((a, 5), (b, 7)):
        link.report = EngineReport("ready", "", SchedulerStats(running=1, decode_tokens=num_tokens))
        rig.links.on_message(link, link.report)
    rig.passed += 1
    assert rig.fleet.status().stats[:2] == (2, 0)
    a.leave()
    stats = rig.fleet.status().stats
    assert (stats.decode_tokens, stats.running) == (12, 1)


def test_a_gap_in_cache_events_asks_for_a_snapshot() -> None:
    rig = Rig(policy="predict")
    a = rig.attach("a")
    assert a.sent == [WatchKvCache(True)]
    rig.links.on_message(a, KvCacheEvents(0, [], [], is_cleared=True))
    rig.links.on_message(a, KvCacheEvents(1, [], [], is_cleared=False))
    assert len(a.sent) == 1
    rig.links.on_message(a, KvCacheEvents(3, [], [], is_cleared=False))
    assert a.sent == [WatchKvCache(True)] * 2


@pytest.mark.parametrize("policy", ["predict", "prefix-aware"])
def test_conversations_return_to_the_engine_that_has_cached_them(policy: str) -> None:
    rig, rng = Rig(policy=policy), Random(7)
    links = [rig.attach(name) for name in "ab"]
    drivers = []
    for link in links:
        source = KvEventSource()
        drivers.append(KvDriver(source, num_blocks=200))
        drivers[-1].attach()
        source.subscribe(partial(rig.links.on_message, link))

    def finish(index: int, request: SubmitRequest) -> None:
        drivers[index].run(request.prompt, 8)
        links[index].answer(request, *[TOKEN] * 8, reason="length")

    # The first turns run together, so that each engine gets some of them.
    for i in range(10):
        rig.submit(*[i] * 12)
    owners = {r.prompt[0]: index for index in (0, 1) for r in links[index].requests}
    assert set(owners.values()) == {0, 1}
    for index, link in enumerate(links):
        for request in link.requests:
            finish(index, request)
    for turn in range(1, 4):
        for i in rng.sample(range(10), 10):
            rig.submit(*[i] * 12, *[TOKEN] * 8 * turn)
            owner = links[owners[i]]
            assert owner.requests[-1].prompt[0] == i, turn
            finish(owners[i], owner.requests[-1])


def test_what_no_engine_can_meet_is_shed() -> None:
    rig = Rig(policy="predict", shed=True)
    a = rig.attach("a")
    a.report = EngineReport("ready", "", SchedulerStats(), StepCostCoefficients(1.0, 1.0))
    rig.links.on_message(a, a.report)
    prompts = [[1, 2, 3]]
    rig.fleet.check_admission(prompts, 8, 0, "", None)
    rig.fleet.check_admission(prompts, 8, 0, "", Slo(ttft_seconds=AGES))
    with pytest.raises(OverloadedError) as refused:
        rig.fleet.check_admission(prompts, 8, 0, "", Slo(ttft_seconds=0.5))
    assert refused.value.retry_after >= 1
    assert sum(rig.fleet.totals().shed_requests.values()) == 1


async def test_the_prefix_caches_of_all_engines_are_reset() -> None:
    rig = Rig()
    a, b = rig.attach("a"), rig.attach("b")
    reset = asyncio.create_task(rig.fleet.reset_prefix_cache())
    await asyncio.sleep(0)
    for link in (a, b):
        assert isinstance(link.sent[-1], ResetPrefixCache)
        assert not reset.done()
        rig.links.on_message(link, CommandDone(link.sent[-1].command_id, 0))
    assert await reset == ""
    reset = asyncio.create_task(rig.fleet.reset_prefix_cache())
    await asyncio.sleep(0)
    a.leave("killed")
    rig.links.on_message(b, CommandDone(1, 0, "busy"))
    assert "killed" in await reset


async def test_stopping_ends_all_requests() -> None:
    rig = Rig()
    await rig.fleet.start()
    a = rig.attach("a")
    stream = rig.submit()
    await rig.fleet.drain(0.0)
    assert rig.fleet.state == "draining"
    assert not rig.fleet.accepts_requests
    with pytest.raises(EngineUnavailableError):
        rig.fleet.check_ready()
    await rig.fleet.stop()
    assert rig.fleet.state == "dead"
    assert stream.pop_deltas()[0].end is not None
    assert a.requests
