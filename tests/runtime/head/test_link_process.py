"""The owner of gllm-link: edges through real processes, restarts, ports and what is left."""

import asyncio
import gc
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import psutil
import pytest

from gllm.observability.child_process import IMPORT_FAILURE
from gllm.runtime.head.link_process import LinkProcess
from gllm.runtime.messaging.security import NodeCertificate, create_certificate
from gllm.transport.base import EdgeLayout
from gllm.transport.edge import Edge, create_edge
from gllm.transport.link.commands import LinkPeer, OpenLinkEdge
from gllm.transport.ring import Ring
from tests.support.stopped_process import stop_process

LAYOUT = EdgeLayout(slots=4, max_tokens=8, hidden_size=16, itemsize=4)
SECONDS = 60.0
RUN = 991
FREEZE_SECONDS = 0.4


async def until(condition: Callable[[], Any]) -> Any:
    async with asyncio.timeout(SECONDS):
        while not (value := condition()):
            await asyncio.sleep(0.01)
    return value


class Machine:
    """One end of an edge: its owner of gllm-link, and the ring of its worker."""

    def __init__(
        self,
        name: str,
        listen: str,
        certificate: NodeCertificate | None,
        node_timeout: float = 0.3,
    ) -> None:
        self.name = name
        self.certificate = certificate
        self.links = LinkProcess(
            name, listen, certificate, node_timeout=node_timeout, freeze_timeout=FREEZE_SECONDS
        )
        self.opened: list[tuple[int, int]] = []
        self.lost: list[tuple[int, int, str]] = []
        self.begin_run(RUN)
        self.edge: Edge | None = None
        self.ring: Ring | None = None

    def begin_run(self, run: int) -> None:
        self.links.begin_run(
            run,
            lambda epoch, edge: self.opened.append((epoch, edge)),
            lambda epoch, edge, cause: self.lost.append((epoch, edge, cause)),
        )

    def open(self, epoch: int, is_sender: bool, peer: LinkPeer) -> None:
        edge = create_edge(f"test-{self.name}", is_remote=True)
        self.links.open(OpenLinkEdge(epoch, 0, is_sender, is_sender, peer), edge)
        self.edge, self.ring = edge, Ring(edge.descriptors[0], edge.descriptors[1], LAYOUT)

    def send(self, step: int) -> None:
        assert self.ring is not None
        begin = self.ring.payload(step)
        self.ring.memory[begin : begin + 64] = bytes([step]) * 64
        self.ring.signal(step, 1)

    async def receive(self, step: int) -> bytes:
        assert self.ring is not None
        async with asyncio.timeout(SECONDS):
            await asyncio.to_thread(self.ring.wait, step, 1)
        begin = self.ring.payload(step)
        return self.ring.memory[begin : begin + 64]

    def close_worker(self) -> None:
        """Close what a worker has of the edge."""
        if self.ring is not None and self.edge is not None:
            self.ring.close()
            self.edge.close()
            self.ring = self.edge = None

    def close(self) -> None:
        self.close_worker()
        self.links.close()
        if self.certificate is not None:
            self.certificate.close()


def restarted_once(machine: Machine) -> bool:
    return machine.links.num_restarts == 1


@asynccontextmanager
async def two_machines(has_tls: bool = True) -> AsyncIterator[tuple[Machine, Machine, LinkPeer]]:
    """A machine that sends and dials, one that receives, and how the second is reached."""
    certificates = [create_certificate() if has_tls else None for _ in range(2)]
    # No edge is lost while a busy machine starts a process.
    left = Machine("left", "", certificates[0], node_timeout=SECONDS)
    right = Machine("right", "127.0.0.1:0", certificates[1], node_timeout=SECONDS)
    try:
        port = await right.links.listen()
        yield left, right, peer_of(right, f"127.0.0.1:{port}")
    finally:
        left.close()
        right.close()


def peer_of(machine: Machine, address: str) -> LinkPeer:
    certificate = machine.certificate
    der = b"" if certificate is None else certificate.certificate
    return LinkPeer(machine.name, address, der)


async def test_a_killed_or_stopped_process_is_started_again_and_loses_no_step() -> None:
    gc.collect()  # Descriptors of earlier tests.
    before = len(os.listdir("/proc/self/fd"))
    async with two_machines() as (left, right, peer):
        assert left.links.process is None, "a machine that only dials starts it with an edge"
        right.open(3, False, peer_of(left, ""))
        left.open(3, True, peer)
        await until(lambda: right.opened)
        assert right.opened == [(3, 0)]
        assert not left.opened, "the receiving end reports"
        left.send(1)
        assert await right.receive(1) == bytes([1]) * 64
        for step, machine, number in (
            (2, right, signal.SIGSTOP),
            (3, left, signal.SIGKILL),
        ):
            process = machine.links.process
            assert process is not None
            if number == signal.SIGSTOP:
                await stop_process(process.pid)
            else:
                process.kill()
            left.send(step)
            assert await right.receive(step) == bytes([step]) * 64
            await until(partial(restarted_once, machine))
            assert machine.links.process is not process
        await until(lambda: any(each.is_open for each in left.links.links))
        assert not left.lost
        assert not right.lost
        for machine in (left, right):
            machine.links.close_edges(3)
        await until(lambda: not left.links.links and not right.links.links)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [each for each in psutil.Process().children() if "gllm-link" in each.name()]


async def test_an_edge_to_nobody_is_lost() -> None:
    left = Machine("left", "", None)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        left.open(1, True, LinkPeer("right", address, b""))
        [(epoch, edge, cause)] = await until(lambda: left.lost)
        assert (epoch, edge) == (1, 0)
        assert cause
    left.close()


@pytest.mark.parametrize("listen", ["", "127.0.0.1:0"])
async def test_a_process_whose_modules_cannot_be_imported_is_not_started_again(
    listen: str, broken_imports: None
) -> None:
    machine = Machine("left", listen, None)
    try:
        if listen:
            with pytest.raises(OSError, match=IMPORT_FAILURE):
                await machine.links.listen()
        else:
            machine.open(1, True, LinkPeer("right", "127.0.0.1:1", b""))
            ((epoch, edge, cause),) = await until(lambda: machine.lost)
            assert (epoch, edge) == (1, 0)
            assert IMPORT_FAILURE in cause
        assert (machine.links.process, machine.links.num_restarts) == (None, 0)
        # Each later epoch fails at once.
        with pytest.raises(OSError, match=IMPORT_FAILURE):
            machine.open(2, True, LinkPeer("right", "127.0.0.1:1", b""))
    finally:
        machine.close()


async def test_another_run_closes_the_edges() -> None:
    async with two_machines(has_tls=False) as (left, right, peer):
        right.open(3, False, peer_of(left, ""))
        left.open(3, True, peer)
        await until(lambda: right.opened)
        for machine in (left, right):
            machine.begin_run(RUN + 1)
            machine.close_worker()
        # The epochs of the new run begin again.
        right.open(1, False, peer_of(left, ""))
        left.open(1, True, peer)
        await until(lambda: len(right.opened) == 2)
        assert right.opened[1] == (1, 0)
        left.send(1)
        assert await right.receive(1) == bytes([1]) * 64


@pytest.mark.full
async def test_a_port_that_is_in_use_is_named_and_tried_again() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        links = LinkProcess("right", f"127.0.0.1:{port}")
        with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
            await links.listen()
    await until(lambda: links.num_restarts > 0 and links.process is not None)
    assert await links.listen() == port
    links.close()
