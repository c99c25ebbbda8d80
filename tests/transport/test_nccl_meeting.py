"""Ranks on GPUs find each other, without GPUs: by gloo, and through host memory."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import FileStore, HashStore

from gllm.kernels.all_reduce import GroupClosedError, GroupMismatchError
from gllm.transport import nccl, nccl_group
from gllm.transport.base import TransportError
from gllm.transport.groups import StageGroups
from gllm.transport.nccl_group import connect, open_nccl_groups
from gllm.transport.region import Region, RegionLayout, create_region
from gllm.transport.shared_region import open_shared_groups
from gllm.transport.staged_group import open_staged_groups
from tests.transport.test_nccl import DirectQueues

LAYOUT = RegionLayout(max_tokens=8, hidden_size=16, vocab_rows=16)


class HostDevice(DirectQueues):
    """One that has memory of the host."""

    def allocate_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype)


class Reached:
    """A device whose events come only after the collective in front of them was waited for."""

    device = torch.device("cpu")
    has_waited = False

    def bind_thread(self) -> None:
        pass

    def event(self) -> "Reached":
        return self

    def query(self) -> bool:
        return self.has_waited

    def stream(self) -> "Reached":
        return self

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def record(self, event: Any) -> None:
        pass

    def wait(self) -> bool:
        self.has_waited = True
        return True

    def allreduce(self, tensor: Tensor, op: Any) -> "Reached":
        return self


def test_ranks_are_connected_once_a_first_sum_is_done() -> None:
    device: Any = Reached()
    connected: Any = connect(HashStore(), 0, 1, device, device, lambda *_: device, 60)
    assert connected is device
    assert device.has_waited


def connection_error(store: Any, create: Callable[..., Any], timeout: float, rank: int = 1) -> str:
    device: Any = Reached()
    with pytest.raises(TransportError) as caught:
        connect(store, rank, 3, device, device, create, timeout)
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named() -> None:
    store, release = HashStore(), threading.Event()

    def blocks(*_: Any) -> None:
        release.wait(60)

    try:
        text = connection_error(store, blocks, 0.05)
        assert text == "the ranks did not connect by NCCL in 0.05 s: rank 0, 2 of 3 is missing"
        for other in (0, 2):
            connection_error(store, blocks, 0.01, other)
        assert "all ranks have begun to; NCCL_DEBUG" in connection_error(store, blocks, 0.05)
    finally:
        release.set()


def test_an_error_of_connecting_is_reported() -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("unhandled system error")

    text = connection_error(HashStore(), fails, 60)
    assert text == "rank 1 cannot connect by NCCL: unhandled system error"


def gloo(store: Any, rank: int, size: int) -> Any:
    return distributed.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))


@pytest.fixture
def region() -> Iterator[Region]:
    made = create_region("test-region")
    yield made
    made.close()


def together(region: Region, run: Callable[[StageGroups], Any], kind: str, ranks: int = 2) -> list:
    """What `run` returns on each rank, all of them connected through the region."""
    results: dict[int, Any] = {}

    def one(rank: int) -> None:
        queues: Any = HostDevice()
        ends = region.descriptors, rank, ranks, LAYOUT, queues, queues
        if kind == "nccl":
            groups = open_nccl_groups(*ends, create=gloo)
        else:
            groups = open_staged_groups(*ends)
        results[rank] = run(groups)
        groups.layers.close()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[rank] for rank in range(ranks)]


@pytest.mark.parametrize("kind", ["nccl", "staged"])
def test_ranks_meet_through_a_region(region: Region, kind: str) -> None:
    def run(groups: StageGroups) -> Any:
        layers, head = groups
        rank = layers.rank
        part = torch.full((2, 16), 1.0 + rank)
        total = layers.sum(part, torch.full((16,), 0.25), torch.float32)
        top = layers.maximum(torch.tensor([1.0 - rank, 2.0 * rank]))
        whole = head.gather(torch.full((3, 3 - rank), float(rank)), [3, 2])
        tokens = head.broadcast(torch.tensor([7, 8]) if rank == 0 else None, 2)
        error = layers.agree_on_step(5, "no memory" if rank else "")
        try:
            layers.agree_on_step(6 + rank, "")
            agreed = True
        except GroupMismatchError:
            agreed = False
        gathered = None if whole is None else whole.tolist()
        return total.unique().tolist(), top.tolist(), gathered, tokens.tolist(), error, agreed

    first, second = together(region, run, kind)
    common = [3.25], [1.0, 2.0]
    assert first == (*common, [[0.0] * 3 + [1.0] * 2] * 3, [7, 8], "no memory", False)
    assert second == (*common, None, [7, 8], "no memory", False)


def test_the_meeting_file_is_the_second_of_a_region(region: Region) -> None:
    store = nccl.rendezvous_store(region.descriptors[1], 1)
    assert isinstance(store, FileStore)
    store.set("a", "b")
    assert nccl.rendezvous_store(region.descriptors[1], 1).get("a") == b"b"


def test_a_rank_that_cannot_connect_cancels_the_groups(region: Region) -> None:
    """A rank that waits in host memory ends at once."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("unhandled system error")

    other = open_shared_groups(region.descriptors, 1, 2, LAYOUT)
    device: Any = Reached()
    errors: list[BaseException] = []

    def connect_first() -> None:
        try:
            open_nccl_groups(region.descriptors, 0, 2, LAYOUT, device, device, create=fails)
        except TransportError as error:
            errors.append(error)

    thread = threading.Thread(target=connect_first)
    thread.start()
    with pytest.raises(GroupClosedError):
        # Already the first may raise: the other rank may cancel before this one has returned.
        [other.layers.agree_on_step(step, "") for step in (nccl_group.RENDEZVOUS_STEP, 0)]
    thread.join(60)
    assert [str(error) for error in errors] == [
        "rank 0 cannot connect by NCCL: unhandled system error"
    ]
