"""Workers of two machines meet through their data movers, and use NCCL or not."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed

from gllm.transport.link.commands import LinkReport
from gllm.transport.log_store import open_log_store
from gllm.transport.nccl import NcclReceiver, NcclSender
from gllm.transport.probed_nccl import NOT_TRUSTED, open_remote_end
from tests.support.network.mover_processes import LAYOUT, Files, Mover, connect
from tests.transport.test_nccl import DirectQueues


@pytest.fixture
def machines() -> Iterator[tuple[Mover, Mover]]:
    with Mover("head") as source, Mover("other") as target:
        yield source, target


def gloo(store: Any, rank: int) -> Any:
    """In place of NCCL, which needs two GPUs."""
    return distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))


def open_ends(files: tuple[Files, Files], refusal: str = "") -> list[Any]:
    """Open both ends at the same time; the sending one refuses NCCL for a reason."""
    ends: dict[int, Any] = {}

    def open_end(rank: int) -> None:
        queues: Any = DirectQueues()
        descriptors = files[rank].descriptors
        kind: Any = NcclReceiver if rank else NcclSender
        ends[rank] = open_remote_end(
            open_log_store(descriptors),
            rank,
            "" if rank else refusal,
            lambda: kind(descriptors, LAYOUT, torch.float32, queues, queues, create_group=gloo),
            lambda: None,
            timeout=60,
        )

    threads = [threading.Thread(target=open_end, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [ends[rank] for rank in range(2)]


def test_steps_are_announced_by_frames_and_sent_by_the_group(
    machines: tuple[Mover, Mover],
) -> None:
    files = connect(*machines)
    sender, receiver = open_ends(files)
    for step in range(6):
        hidden = torch.randn(64, 96)
        thread = threading.Thread(target=sender.send, args=(step, hidden))
        thread.start()
        assert torch.equal(receiver.receive(step, 64), hidden)
        thread.join(60)
    for mover in machines:
        report = mover.wait_for(
            LinkReport, lambda report: bool(report.links) and report.links[0].transport == "nccl"
        )
        assert report.links[0].is_open
    # The frames carry headers alone: 24 KiB of activations per step are not among them.
    assert machines[1].report.links[0].num_bytes < 10_000
    sender.close()
    receiver.close()


def test_the_reason_against_nccl_is_reported(machines: tuple[Mover, Mover]) -> None:
    assert open_ends(connect(*machines), NOT_TRUSTED) == [None, None]
    for mover in machines:
        mover.wait_for(
            LinkReport,
            lambda report: (
                bool(report.links)
                and (report.links[0].transport, report.links[0].cause) == ("tcp+tls", NOT_TRUSTED)
            ),
        )


def test_meeting_survives_a_restart_of_both_data_movers(machines: tuple[Mover, Mover]) -> None:
    files = connect(*machines)
    stores = [open_log_store(file.descriptors) for file in files]
    stores[0].set("a", "before")
    assert stores[1].get("a") == b"before"
    for mover, store in zip(machines, reversed(stores), strict=True):
        mover.restart()
        store.set(mover.node, "written while it was away")
    for node in ("head", "other"):
        assert {store.get(node) for store in stores} == {b"written while it was away"}
    stores[0].set("c", "after")
    assert stores[1].get("c") == b"after"
