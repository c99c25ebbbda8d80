"""Edges between GPUs of two machines, without GPUs: offers, probe, and the way without NCCL."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, distributed

from gllm.transport.base import EdgeClosedError, EdgeLayout
from gllm.transport.edge import Edge, create_edge
from gllm.transport.host_staging import HostStagingReceiver, HostStagingSender
from gllm.transport.log_store import LogStore, open_log_store
from gllm.transport.nccl import RECEIVER_RANK, SENDER_RANK, NcclReceiver, NcclSender
from gllm.transport.probed_nccl import NO_GPU, NOT_TRUSTED, open_remote_end
from gllm.transport.registry import open_edges
from gllm.transport.rendezvous_log import VERDICT_KEY, LogReader, TransportVerdict
from gllm.transport.shared_memory import SharedMemoryReceiver, SharedMemorySender
from tests.transport.test_nccl import DirectQueues

SHAPE = EdgeLayout(slots=2, max_tokens=8, hidden_size=5, itemsize=4)


class HostQueues(DirectQueues):
    """A device in host memory."""

    def pin_memory(self, memory: Tensor) -> None:
        pass

    unpin_memory = pin_memory


@pytest.fixture
def local() -> Iterator[tuple[Edge, Edge]]:
    """Both machines' files of an edge, shared as if data movers copied them."""
    source, target = (create_edge(name, is_remote=True) for name in ("test-source", "test-target"))
    memory, event, source_log, _, source_event = source.descriptors
    target_log, target_event = target.descriptors[2], target.descriptors[4]
    replace = msgspec.structs.replace
    yield (
        replace(source, descriptors=[memory, event, source_log, target_log, source_event]),
        replace(target, descriptors=[memory, event, target_log, source_log, target_event]),
    )
    for edge in (source, target):
        edge.close()


def verdict_of(edge: Edge) -> TransportVerdict:
    """Return the verdict in a worker's log, as its data mover reads it."""
    records = dict(LogReader(edge.descriptors[2]).read())
    return msgspec.msgpack.decode(records[VERDICT_KEY], type=TransportVerdict)


def on_both(edges: tuple[Edge, Edge], work: Callable[[int, LogStore], Any]) -> list[Any]:
    """Return the results of `work` at both ends, which run at the same time."""
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        results[rank] = work(rank, open_log_store(edges[rank].descriptors))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[rank] for rank in range(2)]


class End:
    def __init__(self) -> None:
        self.closed = threading.Event()

    @property
    def is_closed(self) -> bool:
        return self.closed.is_set()

    def close(self) -> None:
        self.closed.set()


def test_nccl_is_used_if_both_ends_offer_it_and_connect(local: tuple[Edge, Edge]) -> None:
    ends = on_both(
        local, lambda rank, store: open_remote_end(store, rank, "", lambda: f"nccl {rank}", End)
    )
    assert ends == ["nccl 0", "nccl 1"]
    assert [verdict_of(edge) for edge in local] == [TransportVerdict("nccl")] * 2


@pytest.mark.parametrize("failing", [SENDER_RANK, RECEIVER_RANK])
def test_both_ends_do_without_nccl_if_one_cannot_connect(
    local: tuple[Edge, Edge], failing: int
) -> None:
    opened = [End(), End()]

    def open_nccl(rank: int) -> End:
        if rank == failing:
            raise RuntimeError("no route to host")
        return opened[rank]

    ends = on_both(
        local,
        lambda rank, store: open_remote_end(
            store, rank, "", lambda: open_nccl(rank), lambda: "staged"
        ),
    )
    assert ends == ["staged", "staged"]
    assert [end.is_closed for end in opened] == [rank != failing for rank in range(2)]
    cause = "NCCL failed: no route to host"
    assert [verdict_of(edge) for edge in local] == [TransportVerdict("tcp", cause)] * 2


def test_a_probe_that_hangs_is_left_behind(local: tuple[Edge, Edge]) -> None:
    release, late = threading.Event(), End()

    def open_nccl() -> End:
        release.wait(60)
        return late

    ends = on_both(
        local,
        lambda rank, store: open_remote_end(store, rank, "", open_nccl, lambda: "staged", 0.05),
    )
    assert ends == ["staged", "staged"]
    assert "did not connect in 0.05 s" in verdict_of(local[0]).cause
    release.set()
    late.closed.wait(60)
    assert late.is_closed


@pytest.mark.parametrize("refusal", [NO_GPU, NOT_TRUSTED])
def test_an_end_without_nccl_does_not_wait_for_the_other(
    local: tuple[Edge, Edge], refusal: str
) -> None:
    def fail() -> None:
        raise AssertionError("NCCL was not offered")

    store = open_log_store(local[0].descriptors)
    assert open_remote_end(store, 0, refusal, fail, lambda: "staged") == "staged"
    assert verdict_of(local[0]) == TransportVerdict("tcp", "" if refusal == NO_GPU else refusal)
    other = open_log_store(local[1].descriptors)
    assert open_remote_end(other, 1, "", fail, lambda: "staged") == "staged"
    assert verdict_of(local[1]) == TransportVerdict("tcp", refusal)


def test_waiting_for_another_machine_ends_when_the_edge_is_cancelled(
    local: tuple[Edge, Edge],
) -> None:
    cancelled = threading.Event()
    store = open_log_store(local[0].descriptors, cancelled.is_set)
    threading.Timer(0.05, cancelled.set).start()
    with pytest.raises(EdgeClosedError):
        open_remote_end(store, 0, "", End, End)


@pytest.mark.parametrize(
    ("default", "is_trusted", "classes"),
    [
        ("nccl", True, (NcclReceiver, NcclSender)),
        ("nccl", False, (HostStagingReceiver, HostStagingSender)),
        ("host-staging", True, (HostStagingReceiver, HostStagingSender)),
        ("shared-memory", True, (SharedMemoryReceiver, SharedMemorySender)),
    ],
)
def test_workers_of_two_machines_open_the_same_transport(
    local: tuple[Edge, Edge],
    default: str,
    is_trusted: bool,
    classes: tuple[type, type],
) -> None:
    def gloo(store: Any, rank: int) -> Any:
        return distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    queues: Any = HostQueues()
    device = None if default == "shared-memory" else (queues, queues)

    def open_end(rank: int, store: LogStore) -> Any:
        incoming = local[1] if rank == RECEIVER_RANK else None
        outgoing = [local[0]] if rank == SENDER_RANK else []
        receivers, senders = open_edges(
            incoming,
            outgoing,
            default,
            SHAPE,
            torch.float32,
            device,
            is_trusted=is_trusted,
            create_nccl_group=gloo,
        )
        return receivers[0] if receivers else senders[0][0]

    sender, receiver = on_both(local, open_end)
    assert (type(receiver), type(sender)) == classes
    with closing(sender), closing(receiver):
        hidden = torch.randn(3, 5)
        thread = threading.Thread(target=sender.send, args=(0, hidden))
        thread.start()
        assert torch.equal(receiver.receive(0, 3), hidden)
        thread.join(60)
    expected = "nccl" if classes[0] is NcclReceiver else "tcp"
    assert [verdict_of(edge).transport for edge in local] == [expected] * 2


def test_counters_of_a_store_add_up(local: tuple[Edge, Edge]) -> None:
    stores = [open_log_store(edge.descriptors) for edge in local]
    assert [stores[0].add("n", 2), stores[1].add("n", 3), stores[0].add("n", 0)] == [2, 5, 5]
    assert stores[1].get("n") == b"5"
    assert not stores[0].check(["m"])
    with pytest.raises(RuntimeError, match="m in"):
        stores[0].wait(["m"], timedelta(seconds=0))
    stores[1].set("m", b"\0\xff")
    assert stores[0].get("m") == b"\0\xff"
    assert stores[0].num_keys() == 2


def test_store_keeps_its_files_until_it_is_freed(local: tuple[Edge, Edge]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store = open_log_store(local[0].descriptors)
    assert len(os.listdir("/proc/self/fd")) == before + 3
    store.set("a", "b")
    del store
    assert len(os.listdir("/proc/self/fd")) == before


def test_two_stores_of_a_log_do_not_overwrite_each_other(local: tuple[Edge, Edge]) -> None:
    """A probe that hangs may write later, beside the thread that has left it behind."""
    stores = [open_log_store(local[0].descriptors) for _ in range(2)]

    def write(number: int) -> None:
        for each in range(200):
            stores[number].set(f"{number} {each}", "x" * each)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    other = open_log_store(local[1].descriptors)
    assert other.num_keys() == 400
    assert all(len(other.get(f"{number} 199")) == 199 for number in range(2))


def test_nccl_is_not_used_with_two_lanes() -> None:
    """Between stages of one machine; and between machines the other end hears why."""
    queues: Any = HostQueues()
    near = create_edge("test-near", num_lanes=2)
    far = create_edge("test-far", is_remote=True, num_lanes=2)
    for edge in (near, far):
        receivers, _ = open_edges(
            edge, [], "nccl", SHAPE, torch.float32, (queues, queues), is_trusted=True
        )
        assert [type(each) for each in receivers] == [HostStagingReceiver] * 2
        for receiver in receivers:
            receiver.close()
    assert verdict_of(far) == TransportVerdict("tcp", "NCCL is not used with --lanes 2")
    for edge in (near, far):
        edge.close()
