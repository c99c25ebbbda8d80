"""Copies of running sequences: what one engine keeps, and what the other one caches."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.observability.logged_scheduler import LoggedScheduler, replay_event
from gllm.observability.step_log import ScheduleEvent, StepLogEvent
from gllm.scheduler.kv_transfers import PrefetchRequest
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from tests.scheduler.test_kv_holds import commit, decode_some, make_scheduler, run
from tests.support.examples import num_examples

PROMPT = [5] * 6


def checkpoint(tokens: list[int], ticket: int = 7) -> PrefetchRequest:
    return PrefetchRequest(ticket, tokens, 2, 2**31 - 1, is_checkpoint=True)


def cached_tokens(scheduler: Scheduler, tokens: list[int], seq: int = 50) -> int:
    """Return how many tokens of a prompt a request finds in the prefix cache."""
    scheduler.add(SchedulerRequest(seq, tokens, 1), 9.0)
    plan = scheduler.schedule(9.0)
    assert plan is not None
    (row,) = (row for row in plan.rows if row.seq == seq)
    commit(scheduler, plan)
    return row.start


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_kept_of_a_running_sequence_can_be_read_while_it_goes_on(is_async: bool) -> None:
    scheduler = make_scheduler(async_scheduling=is_async)
    decode_some(scheduler, SchedulerRequest(0, PROMPT, 20), 5)
    scheduler.keep_computed(0, 77, 8, 0.0)
    (kept,) = scheduler.transfers.pop_readable()
    sequence = scheduler.table.sequences[0]
    assert (kept.ticket, kept.num_tokens, kept.step) == (77, 8, None)
    assert kept.block_ids == sequence.block_ids[:2]
    assert run(scheduler, 0.0) == [0]
    # The sequence has ended, and its blocks stay until the other engine has read them.
    assert scheduler.stats().held_blocks == 2
    scheduler.transfers.confirm_revocation(77)
    assert (scheduler.stats().held_blocks, scheduler.stats().kv_usage) == (0, 0.0)


def test_nothing_is_kept_of_tokens_that_are_not_computed() -> None:
    scheduler = make_scheduler()
    decode_some(scheduler, SchedulerRequest(0, PROMPT, 20), 3)
    # The KV of the last token is computed by the next step.
    scheduler.keep_computed(0, 77, 9, 0.0)
    scheduler.keep_computed(0, 77, 0, 0.0)
    scheduler.keep_computed(1, 77, 4, 0.0)
    scheduler.transfers.release([78])
    scheduler.keep_computed(0, 78, 4, 0.0)
    assert not scheduler.transfers.pop_readable()
    scheduler.keep_computed(0, 77, 8, 0.0)
    scheduler.keep_computed(0, 77, 4, 0.0)
    assert [kept.num_tokens for kept in scheduler.transfers.pop_readable()] == [8]


def test_a_copy_is_in_the_prefix_cache_and_a_later_one_adds_to_it() -> None:
    scheduler, tokens = make_scheduler(), list(range(40))
    stats = scheduler.stats()
    for number, (num_tokens, num_new) in enumerate([(12, 12), (20, 8), (20, 0)]):
        scheduler.transfers.prefetch(checkpoint(tokens[:num_tokens], 7 + number), 0.0)
        (fetch,) = scheduler.transfers.start_fetches(0.0)
        assert (fetch.num_tokens, fetch.first_token) == (num_new, num_tokens - num_new)
        if num_new:
            scheduler.transfers.finish_fetch(fetch.seq, True)
        assert scheduler.kv_cache.free_share == 1
        assert not scheduler.transfers.has_pending_fetches
    assert scheduler.stats() == stats, "a copy counts as no prompt"
    assert cached_tokens(scheduler, tokens) == 20
    assert scheduler.stats().prefix_hits == 20


@pytest.mark.parametrize("cause", ["failed", "released", "cancelled"])
def test_nothing_is_cached_of_a_copy_that_has_failed(cause: str) -> None:
    scheduler, tokens = make_scheduler(), list(range(40))
    scheduler.transfers.prefetch(checkpoint(tokens[:12]), 0.0)
    (fetch,) = scheduler.transfers.start_fetches(0.0)
    if cause != "failed":
        scheduler.transfers.release([7])
        assert scheduler.transfers.pop_cancellations() == [fetch.seq]
    scheduler.transfers.finish_fetch(fetch.seq, False)
    assert scheduler.kv_cache.free_share == 1
    assert not scheduler.transfers.has_pending_fetches
    assert cached_tokens(scheduler, tokens) == 0


@settings(max_examples=num_examples(25, 300), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([10, 16, 40]))
def test_copies_beside_requests_leave_nothing_behind(seed: int, num_blocks: int) -> None:
    """Every request ends, every block returns, and a log makes the same plans again."""
    rng, log = Random(seed), list[StepLogEvent]()
    config = make_scheduler(num_blocks=num_blocks).config
    scheduler = LoggedScheduler(config, log.append, lambda: 0.0)
    ended: list[int] = []
    fetches: list[int] = []
    texts = [[rng.randrange(3) for _ in range(24)] for _ in range(3)]
    num_requests = 0
    for ticket in range(1, 60):
        kind = rng.randrange(5)
        if kind == 0 and num_requests < 12:
            prompt = rng.choice(texts)[: rng.randint(1, 20)]
            scheduler.add(SchedulerRequest(num_requests, prompt, rng.randint(1, 12)), 0.0)
            num_requests += 1
        elif kind == 1:
            tokens = rng.choice(texts)[: rng.randint(1, 24)]
            scheduler.transfers.prefetch(checkpoint(tokens, ticket), 0.0)
        elif kind == 2 and scheduler.table.sequences:
            seq = rng.choice(list(scheduler.table.sequences))
            scheduler.keep_computed(seq, 1000 + ticket, rng.randint(1, 20), 0.0)
        elif kind == 3:
            for kept in scheduler.transfers.pop_readable():
                scheduler.transfers.release([kept.ticket])
        fetches += [each.seq for each in scheduler.transfers.start_fetches(0.0) if each.num_tokens]
        if fetches and rng.random() < 0.5:
            scheduler.transfers.finish_fetch(
                fetches.pop(rng.randrange(len(fetches))), rng.random() < 0.8
            )
        for revoked in scheduler.transfers.pop_revocations(0.0):
            scheduler.transfers.confirm_revocation(revoked)
        if (plan := scheduler.schedule(0.0)) is not None:
            ended += [end.seq for end in commit(scheduler, plan).finished]
    for now in (1000.0, 2000.0, 3000.0):
        # Leases have ended, so that nothing is kept for anybody.
        scheduler.transfers.pop_cancellations()
        fetches += [each.seq for each in scheduler.transfers.start_fetches(now) if each.num_tokens]
        while fetches:
            scheduler.transfers.finish_fetch(fetches.pop(), False)
        for revoked in scheduler.transfers.pop_revocations(now):
            scheduler.transfers.confirm_revocation(revoked)
        ended += run(scheduler, now)
    assert sorted(ended) == list(range(num_requests))
    stats = scheduler.stats()
    assert (stats.held_blocks, stats.kv_usage, stats.fetching) == (0, 0.0, 0)
    assert not scheduler.transfers.has_pending_fetches
    again = Scheduler(config)
    for event in log:
        plan = replay_event(again, event)
        assert not isinstance(event, ScheduleEvent) or plan == event.plan
    assert again.stats() == stats
