"""Random lives of a driver's KV mover: blocks that a mover may read or write are never free."""

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.messages.base import WireMessage
from gllm.messages.handoff import KvPushStarted, KvSource, PrefetchKv, ReleaseKvHolds
from gllm.messages.kv_transfer import (
    CancelKvFetch,
    FetchKv,
    KvCommand,
    KvFetched,
    KvFetchStarted,
    KvMoverGone,
    KvMoverStuck,
    KvRevoked,
    KvTransferTotals,
    RevokeKv,
    ServeKv,
)
from gllm.messages.requests import SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.runtime.driver.driver_kv import ANSWER_SECONDS, DriverKv
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import SampledToken, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from gllm.transport.descriptors import DescriptorError

NUM_BLOCKS, BLOCK_SIZE, MAX_LEN = 24, 4, 64


@dataclass
class Mover:
    """A KV mover that answers when the test lets it."""

    served: dict[int, ServeKv] = field(default_factory=dict)
    fetches: dict[int, FetchKv] = field(default_factory=dict)
    revoked: list[int] = field(default_factory=list)
    """Tickets whose revocation is not confirmed."""
    ended: set[int] = field(default_factory=set)
    """Tickets that are never served again."""
    is_stuck: bool = False

    def handle(self, command: KvCommand) -> None:
        if self.is_stuck:
            raise DescriptorError("it does not read") from BlockingIOError()
        match command:
            case ServeKv(ticket) if ticket in self.ended:
                self.revoked.append(ticket)
            case ServeKv(ticket):
                before = self.served.get(ticket)
                assert before is None or before.num_tokens <= command.num_tokens
                self.served[ticket] = command
            case RevokeKv(ticket):
                self.revoked.append(ticket)
            case FetchKv(number):
                assert number not in self.fetches
                self.fetches[number] = command
            case CancelKvFetch(number):
                assert number in self.fetches


class Life:
    """A driver's transfers with a real scheduler, and one mover at a time."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        config = SchedulerConfig(
            block_size=BLOCK_SIZE,
            expected_output_tokens=0,
            kv_push="layer",
            kv_push_threshold=12,
            max_num_batched_tokens=16,
            max_prefill_tokens=8,
            min_prefill_tokens=4,
        )
        self.scheduler = Scheduler(config.resolve(1, NUM_BLOCKS, MAX_LEN))
        self.now = 0.0
        self.kv = DriverKv(self.scheduler, self.on_report, lambda: self.now)
        self.kv.fetch_choice = "always"
        self.mover: Mover | None = None
        self.num_stuck = 0
        self.totals = KvTransferTotals()
        self.num_seqs = 0
        self.tickets: list[int] = []

    def on_report(self, report: WireMessage) -> None:
        match report:
            case KvMoverStuck():
                self.num_stuck += 1
            case KvTransferTotals():
                self.totals += report
            case KvPushStarted(ticket):
                assert self.mover is not None
                assert ticket in self.mover.served or self.mover.is_stuck
            case _:
                raise AssertionError(report)

    def submit(self) -> None:
        seq, rng = self.num_seqs, self.rng
        self.num_seqs += 1
        length = rng.randrange(2, 40)
        prompt = [rng.randrange(3) for _ in range(length)]
        ticket = seq + 1
        match rng.randrange(3):
            case 0:
                message = SubmitRequest(
                    seq, prompt, SequenceSamplingParams(), 1, [], kv_ticket=ticket
                )
                self.tickets.append(ticket)
            case 1:
                source = KvSource("P", 1, ticket, length, b"")
                if rng.random() < 0.5:
                    self.kv.on_message(PrefetchKv(source, prompt, 4))
                    self.turn()
                message = SubmitRequest(
                    seq, prompt, SequenceSamplingParams(), 4, [], outputs=[[1]], kv_source=source
                )
            case _:
                message = SubmitRequest(seq, prompt, SequenceSamplingParams(), 4, [])
        request = SchedulerRequest(seq, prompt, message.max_tokens, outputs=message.outputs)
        self.scheduler.add(self.kv.add_transfer_fields(request, message), 0.0)

    def turn(self) -> None:
        """Take a turn of the driver, and commit what it schedules."""
        self.kv.start_fetches()
        plan = self.scheduler.schedule(0.0)
        self.kv.report_transfers()
        self.check()
        if plan is not None:
            sampled = [
                SampledToken(row.seq, row.num_preemptions, 1)
                for row in plan.rows
                if row.should_sample
            ]
            self.scheduler.commit(StepResult(plan.step, sampled))
            if self.rng.random() < 0.5:
                # Otherwise further messages arrive first.
                self.kv.report_transfers()

    def check(self) -> None:
        """No block that the mover may read or write is free."""
        if self.mover is None:
            assert not self.scheduler.transfers.fetches
            assert not self.scheduler.transfers.tickets
        elif not self.mover.is_stuck:
            pool = self.scheduler.kv_cache.block_pool
            used = [each.block_ids for each in self.mover.served.values()]
            used += [each.block_ids for each in self.mover.fetches.values()]
            assert not any(map(pool.count_unreferenced, used))

    def answer(self) -> None:
        """Let the mover answer something."""
        mover, rng = self.mover, self.rng
        if mover is None or mover.is_stuck:
            return
        if mover.revoked:
            ticket = mover.revoked.pop(0)
            mover.served.pop(ticket, None)
            mover.ended.add(ticket)
            self.kv.on_message(KvRevoked(ticket))
        elif mover.fetches:
            number = rng.choice(sorted(mover.fetches))
            if rng.random() < 0.3:
                self.kv.on_message(KvFetchStarted(number))
                return
            del mover.fetches[number]
            self.kv.on_message(KvFetched(number, rng.random() < 0.6, 8, 0.1))
        elif mover.served:
            # Its reader has all of it.
            ticket = rng.choice(sorted(mover.served))
            del mover.served[ticket]
            mover.ended.add(ticket)
            self.kv.on_message(KvRevoked(ticket))

    def connect(self) -> None:
        mover = self.mover = Mover()
        # By itself this ends what the mover before had.
        self.kv.connect(mover.handle)

    def end_mover(self) -> None:
        if self.mover is not None:
            self.mover = None
            self.kv.on_message(KvMoverGone())
            self.check()


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 150))
def test_blocks_that_a_mover_uses_are_not_free_and_all_return(seed: int, num_events: int) -> None:
    life = Life(seed)
    rng = life.rng
    events = ["submit", "turn", "answer", "abort", "release", "connect", "end", "stick"]
    for _ in range(num_events):
        match rng.choices(events, [4, 10, 8, 1, 1, 1, 0.5, 0.3])[0]:
            case "submit":
                life.submit()
            case "turn":
                life.turn()
            case "answer":
                life.answer()
            case "abort" if life.num_seqs:
                life.scheduler.abort([rng.randrange(life.num_seqs)])
            case "release" if life.tickets:
                life.kv.on_message(ReleaseKvHolds([rng.choice(life.tickets)]))
            case "connect":
                life.connect()
            case "end":
                life.end_mover()
            case "stick" if life.mover is not None:
                life.mover.is_stuck = True
    if life.mover is not None and life.mover.is_stuck:
        life.connect()
    for _ in range(4000):
        life.kv.on_message(ReleaseKvHolds(list(range(1, life.num_seqs + 1))))
        life.turn()
        life.answer()
        if not life.scheduler.stats().unfinished and not life.kv.is_active:
            break
    assert life.scheduler.kv_cache.free_share == 1
    assert not life.scheduler.stats().unfinished


def test_a_mover_that_does_not_read_is_reported_once() -> None:
    life = Life(0)
    life.connect()
    assert life.mover is not None
    life.mover.is_stuck = True
    for seq in range(2):
        message = SubmitRequest(seq, [seq] * 9, SequenceSamplingParams(), 1, [], kv_ticket=seq + 1)
        life.scheduler.add(
            life.kv.add_transfer_fields(SchedulerRequest(seq, [seq] * 9, 1), message), 0.0
        )
    for _ in range(4):
        life.turn()
    assert life.num_stuck == 1
    # Its blocks stay until it has gone.
    assert life.scheduler.stats().held_blocks
    life.end_mover()
    assert life.scheduler.kv_cache.free_share == 1
    assert not life.kv.is_active


def submit_for_decode(life: Life) -> None:
    """Submit a request whose blocks are held for another engine."""
    message = SubmitRequest(0, [1] * 9, SequenceSamplingParams(), 1, [], kv_ticket=1)
    request = life.kv.add_transfer_fields(SchedulerRequest(0, [1] * 9, 1), message)
    life.scheduler.add(request, 0.0)


def submit_with_fetch(life: Life) -> None:
    """Submit a request whose KV another engine has."""
    source = KvSource("P", 1, 7, 9, b"")
    message = SubmitRequest(
        0, [1] * 9, SequenceSamplingParams(), 4, [], outputs=[[1]], kv_source=source
    )
    request = SchedulerRequest(0, [1] * 9, 4, outputs=[[1]])
    life.scheduler.add(life.kv.add_transfer_fields(request, message), 0.0)


@pytest.mark.parametrize("is_fetch", [False, True])
@pytest.mark.parametrize("turn_seconds", [1.0, ANSWER_SECONDS])
def test_a_mover_that_does_not_answer_is_reported_once(is_fetch: bool, turn_seconds: float) -> None:
    """It reads, and never confirms a revocation or ends a fetch: a frozen process or thread."""
    life = Life(0)
    life.connect()
    (submit_with_fetch if is_fetch else submit_for_decode)(life)
    for _ in range(3):
        life.turn()
    assert life.mover is not None
    assert life.mover.fetches if is_fetch else life.mover.served
    life.scheduler.abort([0])
    life.kv.on_message(ReleaseKvHolds([1]))
    life.turn()
    begin = life.now
    while life.now - begin < ANSWER_SECONDS:
        assert not life.num_stuck
        life.now += turn_seconds
        life.turn()
    if turn_seconds == ANSWER_SECONDS:
        # This process was suspended: the answer may be among its unread messages.
        assert not life.num_stuck
        assert life.scheduler.kv_cache.free_share < 1
        life.answer()
        return
    for _ in range(3):
        life.now += turn_seconds
        life.turn()
    assert life.num_stuck == 1
    # It may still read or write the blocks.
    assert life.scheduler.kv_cache.free_share < 1
    life.end_mover()
    assert life.scheduler.kv_cache.free_share == 1
    assert not life.kv.is_active


def test_a_mover_that_answers_in_time_is_left_alone() -> None:
    life = Life(0)
    life.connect()
    submit_for_decode(life)
    for _ in range(3):
        life.turn()
    life.kv.on_message(ReleaseKvHolds([1]))
    life.turn()
    life.now += 3.0
    life.answer()
    for _ in range(20):
        life.now += 1.0
        life.turn()
    assert not life.num_stuck
    assert life.scheduler.kv_cache.free_share == 1
