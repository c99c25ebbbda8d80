"""Holds of KV blocks: when they begin, who asks for them, and when their blocks return."""

from itertools import permutations
from typing import Any

import pytest

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_holds import HOLD_LEASE_SECONDS, ReadableKv
from gllm.scheduler.kv_transfers import MAX_RELEASED_TICKETS
from gllm.scheduler.plan import FinishedSequence, SampledToken, StepOutput, StepPlan, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest

BLOCK_SIZE = 4


def make_scheduler(num_blocks: int = 16, stages: int = 1, **changes: object) -> Scheduler:
    config = SchedulerConfig(block_size=BLOCK_SIZE, expected_output_tokens=0, **changes)  # type: ignore[arg-type]
    return Scheduler(config.resolve(stages, num_blocks, num_blocks * BLOCK_SIZE))


def commit(scheduler: Scheduler, plan: StepPlan, **fields: object) -> StepOutput:
    """Commit a plan of which each row that samples returns token 1."""
    sampled = [
        SampledToken(row.seq, row.num_preemptions, 1, **fields)  # type: ignore[arg-type]
        for row in plan.rows
        if row.should_sample
    ]
    return scheduler.commit(StepResult(plan.step, sampled))


def run(scheduler: Scheduler, now: float) -> list[int]:
    """Run until nothing can run; the ids of sequences that ended."""
    ended: list[int] = []
    while (plan := scheduler.schedule(now)) is not None:
        ended += [end.seq for end in commit(scheduler, plan).finished]
    return ended


def prefill(scheduler: Scheduler, request: SchedulerRequest, **fields: object) -> FinishedSequence:
    """Run a request of one token alone to its end."""
    scheduler.add(request, 0.0)
    ends: list[FinishedSequence] = []
    while not ends:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        ends = commit(scheduler, plan, **fields).finished
    return ends[0]


def ticket_request(seq: int, num_tokens: int, **changes: object) -> SchedulerRequest:
    fields: dict[str, Any] = {"max_tokens": 1, "kv_ticket": 100 + seq}
    return SchedulerRequest(seq, list(range(seq, seq + num_tokens)), **fields | changes)


def test_the_end_of_a_request_with_a_ticket_holds_its_computed_tokens() -> None:
    scheduler = make_scheduler()
    end = prefill(scheduler, ticket_request(0, 9))
    assert end == FinishedSequence(0, "length", kv_ticket=100, num_kv_tokens=9)
    (hold,) = scheduler.transfers.pop_readable()
    assert hold == ReadableKv(100, 9, hold.block_ids)
    assert len(hold.block_ids) == 3
    assert not scheduler.transfers.pop_readable()
    stats = scheduler.stats()
    assert (stats.unfinished, stats.held_blocks, stats.kv_usage) == (0, 3, 3 / 16)


def test_several_output_tokens_are_held_but_the_last() -> None:
    scheduler = make_scheduler()
    end = prefill(scheduler, ticket_request(0, 6, max_tokens=4))
    assert (end.kv_ticket, end.num_kv_tokens) == (100, 9)
    assert len(scheduler.transfers.pop_readable()[0].block_ids) == 3


def decode_some(scheduler: Scheduler, request: SchedulerRequest, num_tokens: int) -> None:
    """Run a request alone until it has some tokens."""
    scheduler.add(request, 0.0)
    sequence = scheduler.table.sequences[request.seq]
    while sequence.num_output_tokens < num_tokens:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        commit(scheduler, plan)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 6])
def test_a_running_sequence_ends_at_its_next_token_and_is_held(
    num_tokens: int, is_async: bool
) -> None:
    scheduler = make_scheduler(async_scheduling=is_async)
    decode_some(scheduler, SchedulerRequest(0, [5] * 6, 20), num_tokens)
    ahead = scheduler.schedule(0.0)
    scheduler.hand_off(0, 77)
    ends: list[FinishedSequence] = []
    num_steps = 0
    while not ends:
        plan = ahead or scheduler.schedule(0.0)
        assert plan is not None
        # One with async scheduling is scheduled before the result of the one before is known.
        ahead = scheduler.schedule(0.0)
        ends = commit(scheduler, plan).finished
        num_steps += 1
    # Prompt and tokens without the last one, whose KV nobody has computed.
    assert ends == [FinishedSequence(0, "length", kv_ticket=77, num_kv_tokens=6 + num_tokens)]
    assert num_steps == 1
    if ahead is not None:
        commit(scheduler, ahead)
    (hold,) = scheduler.transfers.pop_readable()
    assert (hold.ticket, hold.num_tokens) == (77, 6 + num_tokens)
    scheduler.transfers.release([77])
    assert scheduler.transfers.pop_revocations(0.0) == [77]
    scheduler.transfers.confirm_revocation(77)
    assert scheduler.stats().kv_usage == 0.0


@pytest.mark.parametrize(
    "changes", [{"n": 2}, {"max_tokens": 3}, {"kv_ticket": 9}], ids=["choices", "end", "ticket"]
)
def test_sequences_that_cannot_be_handed_off_run_to_their_end(changes: dict[str, Any]) -> None:
    scheduler = make_scheduler()
    decode_some(scheduler, SchedulerRequest(0, [5] * 6, **{"max_tokens": 5, **changes}), 2)
    request = scheduler.table.sequences[0].request
    scheduler.hand_off(0, 77)
    scheduler.hand_off(55, 78)
    assert scheduler.table.sequences[0].request == request
    scheduler.add(SchedulerRequest(5, [5] * 6, 4), 0.0)
    scheduler.hand_off(5, 79)
    assert not scheduler.table.sequences[5].request.kv_ticket, "it has no token"


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"stop_token_ids": frozenset([1])}, {}),
        ({}, {"error": "no token"}),
        ({}, {"is_finite": False}),
        ({"kv_ticket": 0}, {}),
    ],
)
def test_stops_and_errors_hold_nothing(
    changes: dict[str, object], fields: dict[str, object]
) -> None:
    """A request that has ended is not handed off."""
    scheduler = make_scheduler()
    end = prefill(scheduler, ticket_request(0, 9, **changes), **fields)
    assert (end.kv_ticket, end.num_kv_tokens) == (0, 0)
    assert not scheduler.transfers.pop_readable()
    assert scheduler.stats().kv_usage == 0


def test_an_aborted_request_holds_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add(ticket_request(0, 9), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.abort([0])
    commit(scheduler, plan)
    assert not scheduler.transfers.pop_readable()
    assert scheduler.stats().kv_usage == 0


def test_a_ticket_in_use_holds_nothing_more() -> None:
    scheduler = make_scheduler()
    assert prefill(scheduler, ticket_request(0, 5)).kv_ticket == 100
    assert prefill(scheduler, ticket_request(1, 5, kv_ticket=100)).kv_ticket == 0
    assert scheduler.stats().held_blocks == 2


def test_blocks_return_when_a_revocation_is_confirmed() -> None:
    scheduler = make_scheduler()
    prefill(scheduler, ticket_request(0, 9))
    scheduler.transfers.release([100, 5])
    scheduler.transfers.release([100])
    assert scheduler.transfers.pop_revocations(0.0) == [100]
    assert scheduler.transfers.pop_revocations(0.0) == []
    assert scheduler.stats().held_blocks == 3
    scheduler.transfers.confirm_revocation(100)
    scheduler.transfers.confirm_revocation(100)
    assert scheduler.stats().kv_usage == 0


def test_a_hold_that_has_been_fetched_is_confirmed_without_a_revocation() -> None:
    scheduler = make_scheduler()
    prefill(scheduler, ticket_request(0, 9))
    scheduler.transfers.confirm_revocation(100)
    assert scheduler.transfers.pop_revocations(1e9) == []
    assert scheduler.stats().kv_usage == 0


def test_leases_expire_unless_renewed() -> None:
    scheduler = make_scheduler()
    for seq in range(2):
        prefill(scheduler, ticket_request(seq, 5))
    assert scheduler.transfers.pop_revocations(HOLD_LEASE_SECONDS - 1) == []
    scheduler.transfers.renew([101, 7], HOLD_LEASE_SECONDS - 1)
    assert scheduler.transfers.pop_revocations(HOLD_LEASE_SECONDS) == [100]
    assert scheduler.transfers.pop_revocations(2 * HOLD_LEASE_SECONDS - 1) == [101]
    assert scheduler.stats().held_blocks == 4


def test_held_blocks_are_not_evicted_from_the_prefix_cache() -> None:
    scheduler = make_scheduler(num_blocks=4)
    prefill(scheduler, ticket_request(0, 8))
    (hold,) = scheduler.transfers.pop_readable()
    scheduler.add(SchedulerRequest(1, list(range(50, 57)), 1), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert not set(hold.block_ids) & set(plan.rows[0].new_block_ids)


def test_a_hand_off_waits_for_blocks_that_are_held_for_the_fleet() -> None:
    """Unfetched KV stays where it is: prefill waits for the receivers."""
    scheduler = make_scheduler(num_blocks=4)
    prefill(scheduler, ticket_request(0, 8))
    scheduler.add(ticket_request(50, 12), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert plan.rows[0].num_tokens == 8
    commit(scheduler, plan)
    assert scheduler.schedule(0.0) is None
    assert scheduler.transfers.pop_revocations(0.0) == []
    scheduler.transfers.confirm_revocation(100)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert [end.seq for end in commit(scheduler, plan).finished] == [50]


@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_prompt_revokes_as_many_holds_as_it_needs_oldest_lease_first(is_foreign: bool) -> None:
    """Nobody may ever fetch them; it does not wait until their leases end."""
    scheduler = make_scheduler(num_blocks=8)
    for seq in range(4):
        prefill(scheduler, ticket_request(seq, 8, is_ticket_foreign=is_foreign))
    scheduler.transfers.renew([100], 1.0)
    scheduler.add(SchedulerRequest(50, list(range(50, 62)), 1), 2.0)
    assert scheduler.schedule(2.0) is None, "the blocks have not returned"
    assert scheduler.schedule(2.0) is None
    assert scheduler.transfers.pop_revocations(2.0) == [101, 102]
    for ticket in (101, 102):
        scheduler.transfers.confirm_revocation(ticket)
    assert run(scheduler, 2.0) == [50]
    assert scheduler.transfers.pop_revocations(2.0) == []
    assert scheduler.transfers.tickets == [100, 103]


@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_hand_off_revokes_holds_that_no_router_of_the_fleet_renews(is_foreign: bool) -> None:
    scheduler = make_scheduler(num_blocks=4)
    prefill(scheduler, ticket_request(0, 8))
    prefill(scheduler, ticket_request(1, 8, is_ticket_foreign=True))
    scheduler.add(ticket_request(50, 8, is_ticket_foreign=is_foreign), 0.0)
    assert scheduler.schedule(0.0) is None
    (ticket,) = scheduler.transfers.pop_revocations(0.0)
    assert ticket == (100 if is_foreign else 101)
    scheduler.transfers.confirm_revocation(ticket)
    assert run(scheduler, 0.0) == [50]


def test_holds_that_share_their_blocks_are_revoked_together() -> None:
    scheduler = make_scheduler(num_blocks=5)
    for seq in range(3):
        request = ticket_request(seq, 0, is_ticket_foreign=True)
        prefill(scheduler, request._replace(prompt_token_ids=[1] * 12))
    assert scheduler.stats().held_blocks == 5, "two are shared"
    scheduler.add(SchedulerRequest(50, list(range(50, 66)), 1), 0.0)
    assert scheduler.schedule(0.0) is None
    tickets = scheduler.transfers.pop_revocations(0.0)
    assert tickets == [100, 101, 102]
    for ticket in tickets:
        scheduler.transfers.confirm_revocation(ticket)
    assert run(scheduler, 0.0) == [50]


def test_a_prompt_that_would_not_fit_either_revokes_nothing() -> None:
    scheduler = make_scheduler(num_blocks=8, async_scheduling=False)
    scheduler.add(SchedulerRequest(0, list(range(40, 60)), 4), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    commit(scheduler, plan)
    prefill(scheduler, ticket_request(1, 4, is_ticket_foreign=True, priority=-1))
    scheduler.add(SchedulerRequest(2, list(range(100, 120)), 1), 0.0)
    assert run(scheduler, 0.0) == [0, 2]
    assert scheduler.transfers.pop_revocations(0.0) == []


def test_a_decode_revokes_the_holds_with_the_oldest_leases() -> None:
    scheduler = make_scheduler(num_blocks=6, async_scheduling=False)
    scheduler.add(SchedulerRequest(0, list(range(40, 47)), 9), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    commit(scheduler, plan)
    for seq in (1, 2):
        scheduler.add(ticket_request(seq, 5), float(seq))
    assert run(scheduler, 3.0) == [1, 2]
    assert scheduler.transfers.pop_revocations(3.0) == [101]
    assert scheduler.schedule(3.0) is None, "its blocks have not returned"
    scheduler.transfers.confirm_revocation(101)
    assert run(scheduler, 3.0) == [0]
    assert scheduler.transfers.pop_revocations(3.0) == []


@pytest.mark.parametrize("kv_push", ["off", "layer"])
@pytest.mark.parametrize("order", list(permutations(["release", "abort", "commit"])))
def test_a_client_that_leaves_leaves_no_hold(order: tuple[str, ...], kv_push: str) -> None:
    """However its two messages and the end of the prefill arrive; no lease has to end."""
    scheduler = make_scheduler(kv_push=kv_push, kv_push_threshold=0)
    scheduler.add(ticket_request(0, 9), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    served: set[int] = set()
    for event in order:
        match event:
            case "release":
                scheduler.transfers.release([100])
            case "abort":
                scheduler.abort([0])
            case "commit":
                commit(scheduler, plan)
        served.update(each.ticket for each in scheduler.transfers.pop_readable())
        for ticket in scheduler.transfers.pop_revocations(0.0):
            served.remove(ticket)
            scheduler.transfers.confirm_revocation(ticket)
    assert not served
    stats = scheduler.stats()
    assert (stats.unfinished, stats.held_blocks, stats.kv_usage) == (0, 0, 0.0)
    assert not scheduler.transfers.is_active


def test_released_tickets_are_forgotten_in_time() -> None:
    scheduler = make_scheduler()
    scheduler.transfers.release(range(100, 101 + MAX_RELEASED_TICKETS))
    assert prefill(scheduler, ticket_request(0, 9)).kv_ticket == 100
    assert prefill(scheduler, ticket_request(1, 9)).kv_ticket == 0


def test_the_fields_of_a_hand_off_are_checked() -> None:
    scheduler = make_scheduler()
    with pytest.raises(ValueError, match="kv_ticket holds the KV of one sequence, but n is 2"):
        scheduler.add(ticket_request(0, 5, n=2), 0.0)
    for num_tokens in (-1, 5):
        with pytest.raises(ValueError, match=f"kv_source_tokens {num_tokens} has to be"):
            scheduler.add(SchedulerRequest(0, [1] * 5, 2, kv_source_tokens=num_tokens), 0.0)
    scored = SchedulerRequest(0, [1] * 5, 2, reads_prefix_cache=False, kv_source_tokens=4)
    with pytest.raises(ValueError, match="leave kv_source_tokens out"):
        scheduler.add(scored, 0.0)
