"""Pushes and prefetches: who gets one, and what happens to their blocks."""

from typing import Any

import msgspec
import pytest

from gllm.observability.logged_scheduler import LoggedScheduler, replay_event
from gllm.observability.step_log import KvTransferEvent, ScheduleEvent, StepLogEvent
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_holds import HOLD_LEASE_SECONDS
from gllm.scheduler.kv_transfers import PrefetchRequest
from gllm.scheduler.plan import SampledToken, StepPlan, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest

TICKET, THETA = 7, 10


def make_config(**changes: object) -> SchedulerConfig:
    config = SchedulerConfig(
        block_size=4,
        max_prefill_tokens=8,
        min_prefill_tokens=4,
        max_num_batched_tokens=8,
        kv_push="layer",
        kv_push_threshold=THETA,
        async_scheduling=False,
    )
    return config.__class__(**{**vars(config), **changes}).resolve(1, 32, 64)


def pushed(num_tokens: int, seq: int = 0, **fields: Any) -> SchedulerRequest:
    return SchedulerRequest(seq, list(range(num_tokens)), 1, kv_ticket=TICKET, **fields)


def prefetch(num_tokens: int = 12, ticket: int = TICKET) -> PrefetchRequest:
    return PrefetchRequest(ticket, list(range(num_tokens)), 8)


def step(scheduler: Scheduler, now: float = 0.0) -> bool:
    """Run one step; return False if there was none."""
    plan = scheduler.schedule(now)
    if plan is None:
        return False
    sampled = [
        SampledToken(row.seq, row.num_preemptions, 1) for row in plan.rows if row.should_sample
    ]
    scheduler.commit(StepResult(plan.step, sampled))
    return True


@pytest.mark.parametrize(
    ("changes", "num_tokens", "is_pushed"),
    [
        ({}, THETA - 1, False),
        ({}, THETA, True),
        ({"kv_push": "chunk"}, THETA, True),
        ({"kv_push": "off"}, THETA, False),
        ({"kv_push": "auto"}, THETA, False),
        ({"kv_push": "auto", "preset": "splitwise"}, THETA, True),
        ({"kv_push": "auto", "preset": "distserve"}, THETA, False),
        ({"kv_push_threshold": 0}, 1, True),
    ],
)
def test_prompts_are_pushed_from_the_threshold_on(
    changes: dict[str, object], num_tokens: int, is_pushed: bool
) -> None:
    """S7."""
    scheduler = Scheduler(make_config(**changes))
    scheduler.add(pushed(num_tokens), 0.0)
    scheduler.schedule(0.0)
    assert bool(scheduler.transfers.pop_readable()) == is_pushed


def test_what_the_prefix_cache_has_does_not_count() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(SchedulerRequest(0, list(range(13)), 1), 0.0)
    while step(scheduler):
        pass
    scheduler.add(pushed(12 + THETA - 1, seq=1), 0.0)
    scheduler.schedule(0.0)
    assert not scheduler.transfers.pop_readable()


def test_requests_without_a_ticket_are_not_pushed() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(SchedulerRequest(0, list(range(20)), 1), 0.0)
    scheduler.schedule(0.0)
    assert not scheduler.transfers.pop_readable()


def test_a_push_grows_by_chunks_and_becomes_a_hold() -> None:
    scheduler = Scheduler(make_config(policy="sarathi"))
    scheduler.add(pushed(18), 0.0)
    pushes = []
    while step(scheduler):
        pushes += scheduler.transfers.pop_readable()
    hold = pushes.pop()
    assert [push.num_tokens for push in pushes] == [8, 16, 18]
    assert [push.is_partial for push in pushes] == [True, True, False]
    assert [push.is_first for push in pushes] == [True, False, False]
    assert [push.step for push in pushes] == [0, 1, 2]
    assert pushes[2].block_ids[:2] == pushes[0].block_ids
    assert (hold.step, hold.is_first) == (None, False)
    assert (hold.ticket, hold.num_tokens) == (TICKET, 18)
    assert hold.block_ids == pushes[2].block_ids
    assert not scheduler.transfers.pop_revocations(0.0)
    scheduler.transfers.confirm_revocation(TICKET)
    assert scheduler.kv_cache.free_share == 1


@pytest.mark.parametrize("has_all", [False, True])
def test_blocks_of_an_aborted_prompt_wait_for_the_reader(has_all: bool) -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(pushed(18), 0.0)
    step(scheduler)
    if has_all:
        scheduler.transfers.confirm_revocation(TICKET)
    scheduler.abort([0])
    assert scheduler.transfers.pop_revocations(0.0) == ([] if has_all else [TICKET])
    assert not scheduler.transfers.pop_revocations(0.0)
    assert (scheduler.kv_cache.free_share == 1) == has_all
    scheduler.transfers.confirm_revocation(TICKET)
    assert scheduler.kv_cache.free_share == 1
    assert not scheduler.stats().unfinished


def start_prefetch(scheduler: Scheduler) -> int:
    seq = scheduler.transfers.prefetch(prefetch(), 0.0)
    (fetch,) = scheduler.transfers.start_fetches(0.0)
    assert (fetch.seq, fetch.num_tokens, fetch.is_early) == (seq, 12, True)
    assert scheduler.stats().fetching == 1
    return seq


def decoding(**changes: Any) -> SchedulerRequest:
    fields: dict[str, Any] = {
        "seq": 0,
        "prompt_token_ids": list(range(12)),
        "max_tokens": 8,
        "outputs": [[5]],
        "kv_source_tokens": 12,
        "kv_source_ticket": TICKET,
    }
    return SchedulerRequest(**fields | changes)


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_request_goes_on_with_the_blocks_of_its_prefetch(is_complete: bool) -> None:
    scheduler = Scheduler(make_config())
    seq = start_prefetch(scheduler)
    if is_complete:
        scheduler.transfers.finish_fetch(seq, True)
        assert scheduler.stats().fetching == 0
    scheduler.add(decoding(), 0.0)
    (released,) = scheduler.transfers.start_fetches(0.0)
    assert (released.seq, released.num_tokens) == (0, 0)
    if not is_complete:
        assert scheduler.schedule(0.0) is None
        scheduler.transfers.finish_fetch(seq, True)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert [(row.start, row.token_ids) for row in plan.rows] == [(12, [5])]
    stats = scheduler.stats()
    assert (stats.fetched_tokens, stats.prefill_tokens, stats.fetching) == (12, 0, 0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failed_prefetch_is_an_ordinary_fetch_or_prefill(when: str) -> None:
    scheduler = Scheduler(make_config())
    seq = start_prefetch(scheduler)
    if when == "before":
        scheduler.transfers.finish_fetch(seq, False)
        assert scheduler.kv_cache.free_share == 1
    scheduler.add(decoding(), 0.0)
    fetches = scheduler.transfers.start_fetches(0.0)
    if when == "before":
        (fetch,) = fetches
        assert (fetch.seq, fetch.num_tokens, fetch.is_early) == (0, 12, False)
        scheduler.transfers.finish_fetch(0, False)
    else:
        scheduler.transfers.finish_fetch(seq, False)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert plan.rows[0].start == 0
    assert scheduler.stats().failed_fetches == 1


@pytest.mark.parametrize(
    "changes", [{"cache_salt": "x"}, {"prompt_token_ids": list(range(1, 13))}, {"n": 2}]
)
def test_another_request_gets_nothing_of_a_prefetch(changes: dict[str, object]) -> None:
    scheduler = Scheduler(make_config())
    seq = start_prefetch(scheduler)
    if "n" in changes:
        changes = {**changes, "outputs": (), "kv_source_tokens": 11}
    scheduler.add(decoding(**changes), 0.0)
    assert scheduler.transfers.pop_cancellations() == [seq]
    assert scheduler.transfers.pop_cancellations() == [], "each is cancelled once"
    scheduler.transfers.finish_fetch(seq, True)
    assert scheduler.stats().fetched_tokens == 0
    assert scheduler.kv_cache.free_share == 1


@pytest.mark.parametrize("is_complete", [False, True])
@pytest.mark.parametrize("event", ["release", "lease"])
def test_blocks_of_a_prefetch_without_a_request_return(event: str, is_complete: bool) -> None:
    scheduler = Scheduler(make_config())
    seq = start_prefetch(scheduler)
    if is_complete:
        scheduler.transfers.finish_fetch(seq, True)
    scheduler.transfers.renew([TICKET], 5.0)
    scheduler.transfers.start_fetches(HOLD_LEASE_SECONDS + 4)
    assert scheduler.kv_cache.free_share < 1
    if event == "release":
        scheduler.transfers.release([TICKET])
    else:
        scheduler.transfers.start_fetches(HOLD_LEASE_SECONDS + 6)
    if not is_complete:
        assert scheduler.transfers.pop_cancellations() == [seq]
        scheduler.transfers.finish_fetch(seq, False)
    assert scheduler.kv_cache.free_share == 1
    assert not scheduler.transfers.has_pending_fetches


def test_prefetches_are_checked() -> None:
    scheduler = Scheduler(make_config())
    with pytest.raises(ValueError, match="max_tokens"):
        scheduler.transfers.prefetch(prefetch(60), 0.0)
    scheduler.transfers.prefetch(prefetch(), 0.0)
    with pytest.raises(ValueError, match="ticket 7 has a prefetch already"):
        scheduler.transfers.prefetch(prefetch(), 0.0)


def test_a_threshold_that_changes_is_logged_and_makes_the_same_pushes_again() -> None:
    log = list[StepLogEvent]()
    scheduler = LoggedScheduler(make_config(), log.append, lambda: 0.0)
    scheduler.transfers.set_push_threshold(THETA)
    assert not log, "it has not changed"
    scheduler.transfers.set_push_threshold(5)
    scheduler.add(pushed(5), 0.0)
    scheduler.schedule(0.0)
    assert scheduler.transfers.pop_readable()
    again = Scheduler(make_config())
    for event in log:
        replay_event(again, event)
    assert again.stats() == scheduler.stats()
    assert again.stats().kv_push_threshold == 5
    never = Scheduler(make_config(kv_push="off"))
    never.transfers.set_push_threshold(5)
    assert never.stats().kv_push_threshold == 0


def test_logged_pushes_and_prefetches_make_the_same_plans_again() -> None:
    config, log = make_config(), list[StepLogEvent]()
    scheduler = LoggedScheduler(config, log.append, lambda: 0.0)
    scheduler.add(pushed(18), 0.0)
    while step(scheduler):
        scheduler.transfers.pop_readable()
    scheduler.transfers.confirm_revocation(TICKET)
    seq = scheduler.transfers.prefetch(prefetch(ticket=8), 1.0)
    scheduler.transfers.start_fetches(1.0)
    scheduler.transfers.finish_fetch(seq, True)
    scheduler.add(decoding(seq=1, kv_source_ticket=8), 2.0)
    for _ in range(8):
        step(scheduler, 3.0)
    assert not scheduler.stats().unfinished
    again, pushes = Scheduler(config), []
    for event in msgspec.json.decode(msgspec.json.encode(log), type=list[StepLogEvent]):
        plan = replay_event(again, event)
        assert not isinstance(event, ScheduleEvent) or plan == event.plan
        if isinstance(event, KvTransferEvent) and event.call == "take_pushes":
            pushes += event.ids
    assert pushes == [TICKET]
    assert again.stats() == scheduler.stats()


def test_a_log_repeats_the_end_of_a_complete_prefetch_whose_blocks_a_decode_takes() -> None:
    """Another step is in flight meanwhile, so that the scheduler waits for the driver."""
    config = SchedulerConfig(block_size=4, kv_admission="greedy", async_scheduling=False)
    config, log = config.resolve(2, 11, 44), list[StepLogEvent]()
    scheduler = LoggedScheduler(config, log.append, lambda: 0.0)
    for seq in range(2):
        scheduler.add(SchedulerRequest(seq, list(range(40 + seq, 47 + seq)), 11), 0.0)
        assert step(scheduler)
    seq = scheduler.transfers.prefetch(prefetch(), 1.0)
    scheduler.transfers.start_fetches(1.0)
    scheduler.transfers.finish_fetch(seq, True)
    plans: list[StepPlan] = []
    is_stalled = False
    while scheduler.stats().unfinished:
        scheduler.transfers.start_fetches(1.0)
        while (plan := scheduler.schedule(1.0)) is not None:
            plans.append(plan)
        is_stalled |= bool(scheduler.transfers.started_prefetches) and len(plans) == 1
        assert scheduler.transfers.pop_cancellations() == []
        plan = plans.pop(0)
        sampled = [SampledToken(row.seq, row.num_preemptions, 1) for row in plan.rows]
        scheduler.commit(StepResult(plan.step, sampled))
    assert is_stalled
    assert not scheduler.transfers.started_prefetches
    assert scheduler.stats().preemptions == 0
    again = Scheduler(config)
    for event in log:
        replayed = replay_event(again, event)
        assert not isinstance(event, ScheduleEvent) or replayed == event.plan


@pytest.mark.parametrize("is_required", [True, False])
@pytest.mark.parametrize("kv_push", ["off", "layer"])
def test_first_chunks_are_reported_once_computed_if_others_follow(
    kv_push: str, is_required: bool
) -> None:
    """P1: also without pushes, and behind a cached prefix; only of requests that report them."""
    scheduler = Scheduler(make_config(kv_push=kv_push))

    def reports() -> list[list[int]]:
        """Return the tickets that are reported after each further commit."""
        tickets = []
        while step(scheduler):
            tickets.append(scheduler.transfers.pop_first_chunks())
        return tickets

    plain = SchedulerRequest(0, list(range(13)), 1, reports_first_chunk=is_required)
    scheduler.add(plain, 0.0)
    assert reports() == [[], []]
    scheduler.add(pushed(12 + 8, seq=1, reports_first_chunk=is_required), 0.0)
    assert reports() == [[]]
    scheduler.transfers.release([TICKET])
    for ticket in scheduler.transfers.pop_revocations(0.0):
        scheduler.transfers.confirm_revocation(ticket)
    scheduler.add(pushed(20 + 17, seq=2, reports_first_chunk=is_required), 0.0)
    assert scheduler.schedule(0.0) is not None
    assert not scheduler.transfers.pop_first_chunks()
    scheduler.commit(StepResult(2 + 1, []))
    assert scheduler.transfers.pop_first_chunks() == [TICKET] * is_required
    assert reports() == [[], []]


def test_an_aborted_prompt_reports_no_first_chunk() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(pushed(18, reports_first_chunk=True), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.abort([0])
    scheduler.commit(StepResult(plan.step, []))
    assert not scheduler.transfers.pop_first_chunks()
