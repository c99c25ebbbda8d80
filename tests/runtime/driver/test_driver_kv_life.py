"""Random lives of a driver's KV mover: blocks that a mover may read or write are never free."""

from dataclasses import dataclass, field
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.messages.base import WireMessage
from gllm.messages.handoff import KvPushStarted, KvSource, PrefetchKv, ReleaseKvHolds
from gllm.messages.kv_transfer import (
    CancelKvFetch,
    CopyKvBlocks,
    FetchKv,
    KvBlocksCopied,
    KvCommand,
    KvFetched,
    KvFetchStarted,
    KvMachineCommand,
    KvMachineReport,
    KvMoverConnected,
    KvMoverGone,
    KvMoverStuck,
    KvReport,
    KvRevoked,
    KvTransferTotals,
    RevokeKv,
    ServeKv,
)
from gllm.messages.requests import SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.runtime.driver.driver_kv import DriverKv
from gllm.runtime.driver.kv_movers import ANSWER_SECONDS, MoverGroup
from gllm.runtime.driver.staged_movers import StagedMovers
from gllm.scheduler.config import DEFAULT_THRESHOLD_TOKENS, SchedulerConfig
from gllm.scheduler.plan import SampledToken, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from gllm.transport.descriptors import DescriptorError
from gllm.transport.kv.push_threshold import MAX_TOKENS, MIN_TOKENS, TRIAL_INTERVAL

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
    on_the_way: list[KvCommand] = field(default_factory=list)
    """Commands that another machine's worker has not passed on."""

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
            case CancelKvFetch():
                # It may have ended meanwhile.
                pass

    @property
    def used_blocks(self) -> list[list[int]]:
        """Blocks that it reads or writes, or will."""
        used = [each.block_ids for each in self.served.values()]
        used += [each.block_ids for each in self.fetches.values()]
        return used + [each.block_ids for each in self.on_the_way if isinstance(each, FetchKv)]


class Life:
    """A driver's transfers with a real scheduler, and one mover per machine at a time.

    With staging blocks the movers know nothing but those, and each of two workers copies.
    """

    def __init__(
        self,
        seed: int,
        num_machines: int = 1,
        num_staging_blocks: int = 0,
        kv_push_threshold: int | None = 12,
    ) -> None:
        self.rng = Random(seed)
        config = SchedulerConfig(
            block_size=BLOCK_SIZE,
            expected_output_tokens=0,
            kv_push="off" if num_staging_blocks else "layer",
            kv_push_threshold=kv_push_threshold,
            max_num_batched_tokens=16,
            max_prefill_tokens=8,
            min_prefill_tokens=4,
        )
        self.scheduler = Scheduler(config.resolve(1, NUM_BLOCKS, MAX_LEN))
        self.now = 0.0
        self.num_machines = num_machines
        sends = [partial(self.on_machine_command, machine) for machine in range(1, num_machines)]
        self.copies: tuple[list[CopyKvBlocks], ...] = ([], [])
        """Copies that each worker has not reported, the oldest first."""
        self.staged: StagedMovers | None = None
        self.num_staging_blocks = num_staging_blocks

        def stage(movers: MoverGroup) -> StagedMovers:
            copy = self.on_copy
            self.staged = StagedMovers(movers, num_staging_blocks, len(self.copies), copy)
            return self.staged

        staging = stage if num_staging_blocks else None
        self.kv = DriverKv(self.scheduler, self.on_report, lambda: self.now, sends, staging)
        self.kv.fetch_choice = "always"
        self.movers: dict[int, Mover] = {}
        """By machine."""
        self.num_connections = 0
        self.connections: dict[int, int] = {}
        """Number of the connection of each other machine."""
        self.num_stuck = 0
        self.totals = KvTransferTotals()
        self.num_seqs = 0
        self.tickets: list[int] = []

    def on_copy(self, command: CopyKvBlocks) -> None:
        for worker in self.copies:
            worker.append(command)

    def copy(self) -> None:
        """Let a worker report its oldest copy."""
        worker = self.rng.choice(self.copies)
        if worker:
            self.kv.on_message(KvBlocksCopied(worker.pop(0).number))

    @property
    def mover(self) -> Mover | None:
        """The mover of the driver's machine."""
        return self.movers.get(0)

    def on_machine_command(self, machine: int, message: KvMachineCommand) -> None:
        """Take a command on its way to another machine, whose worker drops it if it is late."""
        if message.connection == self.connections[machine] and machine in self.movers:
            self.movers[machine].on_the_way.append(message.command)

    def deliver(self, machine: int) -> None:
        """Let the commands to another machine arrive."""
        mover = self.movers.get(machine)
        if mover is not None and not mover.is_stuck:
            while mover.on_the_way:
                mover.handle(mover.on_the_way.pop(0))

    def send(self, machine: int, report: KvReport) -> None:
        """Send a mover's report to the driver."""
        self.kv.on_message(KvMachineReport(machine, report) if machine else report)

    def on_report(self, report: WireMessage) -> None:
        match report:
            case KvMoverStuck():
                self.num_stuck += 1
            case KvTransferTotals():
                self.totals += report
            case KvPushStarted(ticket):
                assert self.mover is not None
                assert ticket in self.mover.served or self.mover.is_stuck
                assert len(self.movers) == self.num_machines
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
        """No block that a mover may read or write is free."""
        pool = self.scheduler.kv_cache.block_pool
        if self.staged is not None:
            self.check_staging()
            return
        if not self.movers:
            assert not self.scheduler.transfers.fetches
            assert not self.scheduler.transfers.tickets
        for mover in self.movers.values():
            if not mover.is_stuck:
                assert not any(map(pool.count_unreferenced, mover.used_blocks))

    def check_staging(self) -> None:
        """No block of a copy is free, and no staging block has two uses."""
        assert self.staged is not None
        pool = self.scheduler.kv_cache.block_pool
        copies = [each for worker in self.copies for each in worker]
        assert not any(pool.count_unreferenced(each.block_ids) for each in copies)
        movers = [each for each in self.movers.values() if not each.is_stuck]
        uses = {tuple(blocks) for mover in movers for blocks in mover.used_blocks}
        uses |= {tuple(each.staging_ids) for each in copies}
        used = [block for blocks in uses for block in blocks]
        assert len(used) == len(set(used)) <= self.num_staging_blocks - self.staged.num_free_blocks

    def answer(self) -> None:
        """Let a mover answer something."""
        rng = self.rng
        machine = rng.randrange(self.num_machines)
        mover = self.movers.get(machine)
        if mover is None or mover.is_stuck:
            return
        self.deliver(machine)
        if mover.revoked:
            ticket = mover.revoked.pop(0)
            mover.served.pop(ticket, None)
            mover.ended.add(ticket)
            self.send(machine, KvRevoked(ticket))
        elif mover.fetches:
            number = rng.choice(sorted(mover.fetches))
            if rng.random() < 0.3:
                self.send(machine, KvFetchStarted(number))
                return
            del mover.fetches[number]
            self.send(machine, KvFetched(number, rng.random() < 0.6, 8, 0.1))
        elif mover.served:
            # Its reader has all of it.
            ticket = rng.choice(sorted(mover.served))
            del mover.served[ticket]
            mover.ended.add(ticket)
            self.send(machine, KvRevoked(ticket))

    def connect(self, machine: int = 0) -> None:
        if machine:
            self.end_mover(machine)
        mover = self.movers[machine] = Mover()
        if not machine:
            # By itself this ends what the mover before had.
            self.kv.connect(mover.handle)
            return
        self.num_connections += 1
        self.connections[machine] = self.num_connections
        self.kv.on_message(KvMachineReport(machine, KvMoverConnected(self.num_connections)))

    def end_mover(self, machine: int = 0) -> None:
        if self.movers.pop(machine, None) is not None:
            self.send(machine, KvMoverGone())
            self.check()


@settings(deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 150),
    st.integers(1, 3),
    st.sampled_from([0, 0, 12, 30]),
    st.sampled_from([12, None]),
)
def test_blocks_that_a_mover_uses_are_not_free_and_all_return(
    seed: int,
    num_events: int,
    num_machines: int,
    num_staging_blocks: int,
    kv_push_threshold: int | None,
) -> None:
    life = Life(seed, num_machines, num_staging_blocks, kv_push_threshold)
    rng = life.rng
    weights = {
        "submit": 4,
        "turn": 10,
        "answer": 8,
        "deliver": 4,
        "copy": 8,
        "abort": 1,
        "release": 1,
        "connect": 0.5,
        "connect all": 1,
        "end": 0.5,
        "stick": 0.3,
    }
    for _ in range(num_events):
        match rng.choices([*weights], [*weights.values()])[0]:
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
            case "copy":
                life.copy()
            case "deliver":
                life.deliver(rng.randrange(num_machines))
            case "connect":
                life.connect(rng.randrange(num_machines))
            case "connect all":
                for machine in range(num_machines):
                    if machine not in life.movers:
                        life.connect(machine)
            case "end":
                life.end_mover(rng.randrange(num_machines))
            case "stick" if life.movers:
                life.movers[rng.choice(sorted(life.movers))].is_stuck = True
    for machine, mover in list(life.movers.items()):
        if mover.is_stuck:
            life.connect(machine)
    for _ in range(4000):
        life.kv.on_message(ReleaseKvHolds(list(range(1, life.num_seqs + 1))))
        life.turn()
        life.answer()
        life.copy()
        if not life.scheduler.stats().unfinished and not life.kv.is_active:
            break
    assert life.scheduler.kv_cache.free_share == 1
    assert not life.scheduler.stats().unfinished
    if life.staged is not None:
        assert life.staged.num_free_blocks == num_staging_blocks


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


@pytest.mark.parametrize(
    ("serialized_seconds", "pushed_seconds", "threshold"),
    [(1.0, 0.01, MIN_TOKENS), (0.01, 1.0, MAX_TOKENS)],
)
def test_the_least_length_of_early_transfers_follows_the_measured_ones(
    serialized_seconds: float, pushed_seconds: float, threshold: int
) -> None:
    life = Life(0, kv_push_threshold=None)
    life.connect()
    mover, num_pushed = life.mover, 0
    assert mover is not None
    assert life.scheduler.stats().kv_push_threshold == DEFAULT_THRESHOLD_TOKENS
    num_prompts = 4 * TRIAL_INTERVAL - 2
    for ticket in range(1, num_prompts + 1):
        prompt = [ticket] * 40
        message = SubmitRequest(ticket, prompt, SequenceSamplingParams(), 1, [], kv_ticket=ticket)
        request = life.kv.add_transfer_fields(SchedulerRequest(ticket, prompt, 1), message)
        life.scheduler.add(request, 0.0)
        is_pushed = False
        while ticket not in mover.served or mover.served[ticket].step:
            life.turn()
            is_pushed |= ticket in mover.served and mover.served[ticket].step > 0
        num_pushed += is_pushed
        life.now += pushed_seconds if is_pushed else serialized_seconds
        life.answer()
    life.kv.add_transfer_fields(request, message)
    assert life.scheduler.stats().kv_push_threshold == threshold
    # The other way is tried now and then.
    assert 0 < min(num_pushed, num_prompts - num_pushed) <= TRIAL_INTERVAL
