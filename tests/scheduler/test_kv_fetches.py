"""Fetches of KV: what is fetched, when it begins, and how a sequence continues."""

from typing import Any

import pytest

from gllm.scheduler.kv_transfers import KvFetch
from gllm.scheduler.plan import ScheduledRow
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from tests.scheduler.test_kv_holds import commit, make_scheduler, run


def handed_off(
    seq: int, num_tokens: int, max_tokens: int = 3, **changes: object
) -> SchedulerRequest:
    """A request whose first token another engine has generated."""
    fields: dict[str, Any] = {
        "prompt_token_ids": list(range(seq, seq + num_tokens)),
        "outputs": [[9]],
        "kv_source_tokens": num_tokens,
    }
    return SchedulerRequest(seq, max_tokens=max_tokens, **fields | changes)


def start_fetch(scheduler: Scheduler, request: SchedulerRequest) -> KvFetch:
    scheduler.add(request, 0.0)
    (fetch,) = scheduler.transfers.start_fetches(0.0)
    return fetch


def next_row(scheduler: Scheduler) -> ScheduledRow:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    (row,) = plan.rows
    commit(scheduler, plan)
    return row


def test_a_sequence_decodes_after_its_fetch() -> None:
    """The input of its first row is the token that the other engine has generated."""
    scheduler = make_scheduler()
    fetch = start_fetch(scheduler, handed_off(0, 9))
    assert fetch == KvFetch(0, 0, 9, fetch.block_ids)
    assert len(fetch.block_ids) == 3
    assert scheduler.stats().waiting_tokens == 0
    assert scheduler.schedule(0.0) is None
    assert scheduler.transfers.start_fetches(0.0) == []
    assert scheduler.stats().fetching == 1
    scheduler.transfers.finish_fetch(0, True)
    row = next_row(scheduler)
    assert row == ScheduledRow(0, 0, 9, 1, fetch.block_ids, [9], True)
    assert run(scheduler, 0.0) == [0]
    stats = scheduler.stats()
    assert (stats.kv_usage, stats.fetched_tokens, stats.prefill_tokens) == (0, 9, 0)


def test_a_failed_fetch_is_an_ordinary_prefill() -> None:
    scheduler = make_scheduler()
    start_fetch(scheduler, handed_off(0, 9))
    scheduler.transfers.finish_fetch(0, False)
    assert scheduler.transfers.start_fetches(1.0) == []
    row = next_row(scheduler)
    assert (row.num_preemptions, row.start, row.num_tokens, row.token_ids) == (1, 0, 10, [9])
    assert run(scheduler, 0.0) == [0]
    assert (scheduler.stats().failed_fetches, scheduler.stats().kv_usage) == (1, 0)


def test_only_what_the_prefix_cache_lacks_is_fetched() -> None:
    scheduler = make_scheduler()
    scheduler.add(SchedulerRequest(0, list(range(5, 14)), 1), 0.0)
    run(scheduler, 0.0)
    fetch = start_fetch(scheduler, handed_off(5, 14))
    assert (fetch.first_token, fetch.num_tokens, len(fetch.block_ids)) == (8, 6, 2)
    scheduler.transfers.finish_fetch(5, True)
    row = next_row(scheduler)
    assert (row.start, row.num_tokens, len(row.new_block_ids)) == (14, 1, 4)


def test_a_cached_prompt_needs_no_fetch() -> None:
    scheduler = make_scheduler()
    scheduler.add(SchedulerRequest(0, list(range(5, 14)), 1), 0.0)
    run(scheduler, 0.0)
    assert start_fetch(scheduler, handed_off(5, 8)) == KvFetch(5, 8, 0, [])
    row = next_row(scheduler)
    assert (row.start, row.num_tokens, row.token_ids) == (8, 1, [9])
    with pytest.raises(ValueError, match="sequence 5 has no fetch in flight"):
        scheduler.transfers.finish_fetch(5, True)


def test_choices_fork_from_a_fetched_prompt() -> None:
    """The last prompt token is computed, so that each choice samples its first token itself."""
    scheduler = make_scheduler()
    request = SchedulerRequest(0, list(range(9)), 3, n=3, kv_source_tokens=8)
    assert start_fetch(scheduler, request).num_tokens == 8
    scheduler.transfers.finish_fetch(0, True)
    assert next_row(scheduler)[2:4] == (8, 1)
    assert sorted(run(scheduler, 0.0)) == [0, 1, 2]
    # The choices share the full prompt blocks, which were fetched.
    assert scheduler.stats().prefill_tokens == 3


def test_what_was_not_fetched_is_prefilled() -> None:
    """The output of a resumed request may be longer than the source."""
    scheduler = make_scheduler()
    start_fetch(scheduler, handed_off(0, 9, 9, outputs=[[9, 8, 7]]))
    scheduler.transfers.finish_fetch(0, True)
    row = next_row(scheduler)
    assert (row.start, row.num_tokens, row.token_ids) == (9, 3, [9, 8, 7])


@pytest.mark.parametrize(("is_foreign", "num_tokens"), [(False, 0), (True, 8)])
def test_fetched_blocks_are_published_unless_foreign(is_foreign: bool, num_tokens: int) -> None:
    scheduler = make_scheduler()
    start_fetch(scheduler, handed_off(0, 8, is_kv_foreign=is_foreign))
    assert start_fetch(scheduler, handed_off(1, 8, prompt_token_ids=list(range(8))))[2] == 8
    scheduler.transfers.finish_fetch(0, True)
    request = handed_off(2, 8, prompt_token_ids=list(range(8)))
    assert start_fetch(scheduler, request).num_tokens == num_tokens


def test_blocks_of_an_aborted_fetch_return_at_its_end() -> None:
    scheduler = make_scheduler()
    start_fetch(scheduler, handed_off(0, 9))
    scheduler.abort([0])
    assert scheduler.transfers.pop_cancellations() == [0]
    assert scheduler.transfers.pop_cancellations() == []
    assert scheduler.stats().kv_usage == 3 / 16
    scheduler.transfers.finish_fetch(0, True)
    assert scheduler.stats().kv_usage == 0


def test_an_aborted_request_fetches_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add(handed_off(0, 9), 0.0)
    scheduler.abort([0])
    assert scheduler.transfers.start_fetches(0.0) == []
    assert scheduler.transfers.pop_cancellations() == [0]
    assert not scheduler.transfers.has_pending_fetches


def test_a_decode_takes_the_blocks_of_a_fetch_that_has_not_begun() -> None:
    """Whatever its rank; once bytes have arrived, only those of worse rank."""
    for has_begun in (False, True):
        scheduler = make_scheduler(num_blocks=8, async_scheduling=False)
        scheduler.add(SchedulerRequest(0, list(range(40, 47)), 12), 0.0)
        assert next_row(scheduler).num_tokens == 7
        start_fetch(scheduler, handed_off(1, 15, age_seconds=1.0))
        if has_begun:
            scheduler.transfers.record_progress(1)
        assert run(scheduler, 0.0) == []
        assert scheduler.transfers.pop_cancellations() == ([] if has_begun else [1])
        scheduler.transfers.finish_fetch(1, has_begun)
        assert run(scheduler, 1.0) == ([1, 0] if has_begun else [0, 1])


def fill_with_fetch(age_seconds: float) -> Scheduler:
    """Return a scheduler in which decode 0 takes the blocks of fetch 1.

    Args:
        age_seconds: of the request that fetches; the decode's is 1.
    """
    scheduler = make_scheduler(num_blocks=8, async_scheduling=False)
    scheduler.add(SchedulerRequest(0, list(range(40, 47)), 12, age_seconds=1.0), 0.0)
    assert next_row(scheduler).num_tokens == 7
    start_fetch(scheduler, handed_off(1, 15, age_seconds=age_seconds))
    assert run(scheduler, 0.0) == []
    assert scheduler.transfers.pop_cancellations() == [1]
    return scheduler


@pytest.mark.parametrize("age_seconds", [0.0, 2.0])
def test_a_victim_fetches_later(age_seconds: float) -> None:
    scheduler = fill_with_fetch(age_seconds)
    assert scheduler.transfers.finish_fetch(1, False)
    assert scheduler.transfers.start_fetches(1.0) == []
    while not (fetches := scheduler.transfers.start_fetches(1.0)):
        assert next_row(scheduler).seq == 0
    assert [(fetch.seq, fetch.num_tokens) for fetch in fetches] == [(1, 15)]
    assert scheduler.transfers.pop_cancellations() == []
    assert not scheduler.transfers.finish_fetch(1, True)
    assert run(scheduler, 2.0) == [1]
    stats = scheduler.stats()
    assert (stats.prefill_tokens, stats.fetched_tokens, stats.failed_fetches) == (7, 15, 0)
    assert (stats.preemptions, stats.kv_usage) == (1, 0)


def test_a_victim_that_cannot_fetch_again_is_prefilled() -> None:
    """The source of a fetch that was complete, and that of an aborted request, are not kept."""
    scheduler = fill_with_fetch(0.0)
    assert not scheduler.transfers.finish_fetch(1, True)
    assert not scheduler.transfers.has_pending_fetches
    assert run(scheduler, 1.0) == [0, 1]
    scheduler = fill_with_fetch(0.0)
    scheduler.abort([1])
    assert not scheduler.transfers.finish_fetch(1, False)
    assert not scheduler.transfers.has_pending_fetches
    assert run(scheduler, 1.0) == [0]


def test_a_fetch_gives_way_to_decodes_of_worse_rank_only_once() -> None:
    scheduler = fill_with_fetch(2.0)
    scheduler.transfers.finish_fetch(1, False)
    while not scheduler.transfers.start_fetches(1.0):
        assert next_row(scheduler).seq == 0
    # Takes the rest of the cache, and lacks a block for its second token.
    scheduler.add(SchedulerRequest(30, list(range(60, 76)), 4), 1.0)
    assert next_row(scheduler).num_tokens == 16
    assert scheduler.schedule(1.0) is None
    assert scheduler.transfers.pop_cancellations() == []
    scheduler.transfers.finish_fetch(1, True)
    assert run(scheduler, 2.0) == [1, 30]


def test_a_victim_does_not_take_back_the_blocks_of_a_decode() -> None:
    """The decode lacks the block for a token that a row in flight samples."""
    scheduler = make_scheduler(num_blocks=8, kv_admission="greedy")
    scheduler.add(SchedulerRequest(0, list(range(40, 55)), 12), 0.0)
    prefill = scheduler.schedule(0.0)
    assert prefill is not None
    start_fetch(scheduler, handed_off(1, 15))
    decode = scheduler.schedule(0.0)
    assert decode is not None
    commit(scheduler, prefill)
    assert scheduler.schedule(0.0) is None
    assert scheduler.transfers.pop_cancellations() == [1]
    assert scheduler.transfers.finish_fetch(1, False)
    assert scheduler.transfers.start_fetches(0.0) == []
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert [row.start for row in plan.rows] == [16]


def test_a_fetch_does_not_take_the_blocks_of_the_first_prompt() -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add(SchedulerRequest(0, list(range(40, 60)), 1), 0.0)
    scheduler.add(handed_off(1, 13), 0.0)
    assert scheduler.transfers.start_fetches(0.0) == []
    assert next_row(scheduler).num_tokens == 20
    assert [fetch.seq for fetch in scheduler.transfers.start_fetches(0.0)] == [1]


def test_a_fetch_starts_beside_the_first_prompt_once_that_is_admitted() -> None:
    """There are blocks for both, but a prompt that is admitted later could take them back."""
    chunks = {"max_prefill_tokens": 8, "min_prefill_tokens": 8, "max_num_batched_tokens": 8}
    scheduler = make_scheduler(**chunks)
    scheduler.add(SchedulerRequest(0, list(range(40, 60)), 2), 0.0)
    scheduler.add(handed_off(1, 9), 0.0)
    assert scheduler.transfers.start_fetches(0.0) == []
    assert next_row(scheduler).num_tokens == 8
    assert [fetch.seq for fetch in scheduler.transfers.start_fetches(0.0)] == [1]


@pytest.mark.parametrize(("priority", "is_preempted"), [(0, False), (1, True)])
def test_a_waiting_request_takes_the_blocks_of_a_fetch_of_worse_priority_only(
    priority: int, is_preempted: bool
) -> None:
    """A fetch of the same priority ends by itself, whatever the rank of the one that waits."""
    scheduler = make_scheduler(num_blocks=8)
    start_fetch(scheduler, handed_off(0, 17, priority=priority))
    scheduler.add(handed_off(30, 17, age_seconds=1.0), 0.0)
    assert scheduler.transfers.start_fetches(0.0) == []
    assert scheduler.schedule(0.0) is None
    assert scheduler.transfers.pop_cancellations() == ([0] if is_preempted else [])
    scheduler.transfers.finish_fetch(0, not is_preempted)
    fetches = scheduler.transfers.start_fetches(1.0)
    assert [fetch.seq for fetch in fetches] == ([30] if is_preempted else [])
    if not is_preempted:
        assert next_row(scheduler)[:3] == (0, 0, 17)


def test_prompts_do_not_take_the_blocks_of_a_fetch_of_better_rank() -> None:
    scheduler = make_scheduler(num_blocks=8)
    first = start_fetch(scheduler, handed_off(1, 13))
    scheduler.add(handed_off(21, 25), 0.0)
    scheduler.add(SchedulerRequest(50, [3, 4, 5], 1), 0.0)
    assert scheduler.transfers.start_fetches(0.0) == []
    assert scheduler.schedule(0.0) is None
    scheduler.transfers.finish_fetch(first.seq, True)
    assert run(scheduler, 0.0)[0] == 1


def test_an_unfinished_request_is_not_fetched_again() -> None:
    scheduler = make_scheduler()
    start_fetch(scheduler, handed_off(0, 9))
    (request,) = scheduler.unfinished_requests(0.0)
    assert (request.kv_source_tokens, [*request.outputs]) == (0, [[9]])
