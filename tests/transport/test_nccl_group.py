"""Groups of ranks on GPUs without GPUs: order on fake devices, and how a group ends."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import distributed

from gllm.kernels.all_reduce import GroupClosedError
from gllm.transport import nccl
from gllm.transport.base import TransportError
from gllm.transport.device_group import DeviceRankGroup
from gllm.transport.nccl_group import NcclRankGroup
from gllm.transport.staged_group import StagedRankGroup
from tests.support.gpu.fake_graphs import Unjoined
from tests.support.gpu.fake_nccl import FakeCommunicator, FakeHostGroup, fake_host_groups
from tests.support.gpu.fake_streams import FakeQueues
from tests.support.gpu.memory_uses import Race
from tests.support.gpu.turns import Stuck, Turns
from tests.transport.test_nccl import DirectQueues

RANKS, STEPS, ROWS = 3, 4, 2
SIZES = (4, 4, 3)
"""Columns of each rank in a gather."""
WIDTH = 4
Numbers = list[list[float]]
"""What each step leaves, one list per step."""


def expected(rank: int) -> Numbers:
    """What `work` leaves, by arithmetic."""
    made = []
    for step in range(STEPS):
        own = [float(1 + 10 * step + each) for each in range(RANKS)]
        total = sum(own) + 0.5
        gathered = [own[each] * total for each in range(RANKS) for _ in range(SIZES[each])]
        top = max(own) * total
        told = 100.0 + step - 7
        made.append([total, top, told, *(gathered if rank == 0 else [0.0] * sum(SIZES))])
    return made


def work(
    group: DeviceRankGroup, queues: FakeQueues, stream: Any, captured: bool, order: random.Random
) -> Numbers:
    """Steps with every collective, in memory that each step overwrites as soon as it may."""
    rank = group.rank
    own = queues.zeros((1,), torch.float32)
    tokens = queues.zeros((3,), torch.int64)
    bias = queues.zeros((WIDTH,), torch.float32)
    x = queues.zeros((ROWS, WIDTH), torch.float32)
    out = queues.zeros((3 + sum(SIZES),), torch.float32)
    results = queues.allocate_pinned((STEPS, 3 + sum(SIZES)), torch.float32)

    def compute() -> None:
        bias.fill_(0.5)
        x.fill_(1.0)
        x.mul_(own)
        total = group.sum(x.clone(), bias, torch.float32)
        x.mul_(total)
        out[:1].copy_(total[0, :1])
        out[1:2].copy_(group.maximum(x[:1, 0]))
        whole = group.gather(x[:, : SIZES[rank]], SIZES)
        if whole is not None:
            out[3:].copy_(whole[-1])
        # What a rank sent, it may overwrite.
        x.fill_(-1.0)
        first = group.broadcast(tokens[:2] if rank == 0 else None, 2)
        second = group.broadcast(tokens[2:] if rank == 0 else None, 1)
        out[2:3].copy_(first[:1] + second)
        tokens.fill_(-1)

    with stream.current():
        compute()
    graph = queues.capture(stream, compute) if captured else None
    for step in range(STEPS):
        group.agree_on_step(step, "")
        with stream.current():
            own.fill_(float(1 + 10 * step + rank))
            tokens.fill_(100 + step)
            tokens[2:].fill_(-7)
            if graph is None:
                compute()
            else:
                with group.launching():
                    graph.replay()
            results[step].copy_(out)
        group.end_step(step)
        for _ in range(order.randrange(3)):
            queues.advance_some()
    queues.synchronize()
    return results.tolist()


def worked(
    seed: int,
    kind: str = "nccl",
    captured: bool = False,
    ignored: str = "",
    checks: bool = True,
) -> tuple[list[Numbers], set[str]]:
    """What each rank's steps leave, and the places that wait."""
    turns = Turns(seed)
    hosts = fake_host_groups(RANKS, turns, has_places=seed % 2 == 0)
    arrived: list[list[Any]] = [[] for _ in range(RANKS)]
    waits: set[str] = set()

    def one(rank: int) -> Numbers:
        eagerness = (0.0, 0.4, 0.9)[(seed + rank) % 3]
        with FakeQueues(seed * RANKS + rank, ignored, checks, eagerness, turns) as queues:
            stream = queues.stream()
            group: DeviceRankGroup
            if kind == "nccl":
                wire = FakeCommunicator(rank, queues, arrived)
                group = NcclRankGroup(hosts[rank], wire, queues, stream, in_background=False)
            else:
                group = StagedRankGroup(hosts[rank], queues, stream)
            numbers = work(group, queues, stream, captured, random.Random(seed))
            waits.update(queues.waits)
            return numbers

    return turns.run([partial(one, rank) for rank in range(RANKS)]), waits


CASES = [("nccl", False), ("nccl", True), ("staged", False)]


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 6))]
)
@pytest.mark.parametrize(("kind", "captured"), CASES)
def test_any_order_gives_the_collectives(kind: str, captured: bool, seed: int) -> None:
    assert worked(seed, kind, captured)[0] == [expected(rank) for rank in range(RANKS)]


def waits_of(kind: str) -> set[str]:
    """Return the places in the groups' files that wait."""
    return {wait for wait in worked(0, kind)[1] if "_group.py" in wait and "test_" not in wait}


WAITS = {"nccl": 5, "staged": 2}
"""Number of places that wait, by kind of group."""


@pytest.mark.parametrize("kind", WAITS)
def test_every_wait_is_there(kind: str) -> None:
    assert len(waits_of(kind)) == WAITS[kind]


def work_often(kind: str, wait: str, captured: bool = False) -> None:
    for seed in range(20):
        worked(seed, kind, captured, ignored=wait)


def goes_wrong(seed: int, kind: str, wait: str) -> bool:
    try:
        return worked(seed, kind, ignored=wait, checks=False)[0] != [*map(expected, range(RANKS))]
    except Stuck:
        return True


@pytest.mark.full
@pytest.mark.parametrize("kind", WAITS)
def test_no_wait_can_be_spared(kind: str) -> None:
    """Clocks miss it, and so do numbers."""
    for wait in waits_of(kind):
        with pytest.raises(Race):
            work_often(kind, wait)
        assert any(goes_wrong(seed, kind, wait) for seed in range(40)), wait


@pytest.mark.full
def test_no_wait_of_a_graph_can_be_spared() -> None:
    """What is not joined does not end with the graph."""
    waits = {wait for wait in worked(0, captured=True)[1] if wait.startswith("nccl_group.py")}
    assert len(waits) == 5
    for wait in waits:
        with pytest.raises((Race, Unjoined)):
            work_often("nccl", wait, captured=True)


def test_ranks_that_call_different_collectives_are_found() -> None:
    """Of the double, which else could not tell whether ranks agree."""
    turns = Turns(1)
    arrived: list[list[Any]] = [[], []]

    def one(rank: int) -> None:
        with FakeQueues(rank, turns=turns) as queues:
            stream = queues.stream()
            wire = FakeCommunicator(rank, queues, arrived)
            tensor = queues.zeros((2 + rank,), torch.float32)
            with stream.current():
                wire.allreduce(tensor, distributed.ReduceOp.SUM)
            queues.synchronize()

    with pytest.raises(AssertionError, match="ranks call"):
        turns.run([partial(one, rank) for rank in range(2)])


class Wire:
    """A communicator that is only aborted."""

    def __init__(self) -> None:
        self.aborts = 0
        self.is_aborted = threading.Event()

    def abort(self) -> None:
        self.aborts += 1
        self.is_aborted.set()


class Alone:
    """A group of one rank."""

    def __init__(self, device: Any, **options: Any) -> None:
        self.host = fake_host_groups(1, Turns(0))[0]
        self.wire = Wire()
        self.faults: list[BaseException] = []
        options |= {"on_error": self.faults.append, "in_background": False}
        self.group = NcclRankGroup(self.host, cast(Any, self.wire), device, device, **options)

    @property
    def is_host_cancelled(self) -> bool:
        """Whether the groups in host memory are cancelled."""
        layers, head = self.host
        assert isinstance(layers, FakeHostGroup)
        assert isinstance(head, FakeHostGroup)
        return layers.is_cancelled and head.is_cancelled


@contextmanager
def alone(device: Any = None, **options: Any) -> Iterator[Alone]:
    """A group of one rank, by default on a device that does everything at once."""
    made = Alone(DirectQueues() if device is None else device, **options)
    yield made
    made.group.close()
    assert made.wire.aborts == 1


def test_a_cancelled_group_ends_its_collectives_and_takes_no_more() -> None:
    with alone() as rank:
        group = rank.group
        group.cancel()
        group.cancel()
        assert rank.wire.is_aborted.wait(60)
        assert rank.wire.aborts == 1
        for call in (
            lambda: group.sum(torch.ones(1, 1), None, torch.float32),
            lambda: group.maximum(torch.ones(1)),
            lambda: group.gather(torch.ones(1, 1), [1]),
            lambda: group.broadcast(None, 1),
            group.launching().__enter__,
        ):
            with pytest.raises(GroupClosedError):
                call()
        assert rank.is_host_cancelled
        assert rank.faults == []


def test_a_launch_ends_before_its_collectives_are_aborted() -> None:
    with alone(cancel_seconds=60.0) as rank:
        with rank.group.launching():
            thread = threading.Thread(target=rank.group.cancel)
            thread.start()
            while not rank.is_host_cancelled:
                time.sleep(0.001)
            assert not rank.wire.is_aborted.wait(0.05)
        thread.join(60)
        assert rank.wire.is_aborted.wait(60)


def test_a_launch_behind_a_stuck_collective_delays_a_cancel_only_so_long() -> None:
    with alone(cancel_seconds=0.01) as rank, rank.group.launching():
        thread = threading.Thread(target=rank.group.cancel)
        thread.start()
        thread.join(60)
        assert rank.wire.is_aborted.wait(60)


class StuckQueues(DirectQueues):
    """A device that reaches no event."""

    def query(self) -> bool:
        return False


def test_a_step_that_does_not_end_cancels_the_group_and_is_named() -> None:
    with alone(StuckQueues()) as rank:
        group = rank.group
        group.end_step(3)
        group.monitor.check_transfers(time.monotonic() + nccl.TIMEOUT_SECONDS + 1)
        assert rank.wire.is_aborted.wait(60)
        expected = "the collectives of step 3 did not end in 60 s"
        assert [str(fault) for fault in rank.faults] == [expected]
        with pytest.raises(TransportError, match="step 3"):
            group.end_step(4)
        with pytest.raises(GroupClosedError):
            group.maximum(torch.ones(1))
