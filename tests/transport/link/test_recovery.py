"""Data movers move steps between rings; broken connections and kills lose or repeat none."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gllm.transport.base import EdgeLayout, StepFailedError
from gllm.transport.descriptors import create_channels
from gllm.transport.link.commands import (
    CloseLinkEdges,
    LinkEdgeLost,
    LinkReport,
    decode_link_message,
)
from gllm.transport.link.mover import Outbox
from gllm.transport.ring import Ring
from tests.support.network.mover_processes import (
    LAYOUT,
    WAIT_SECONDS,
    Files,
    Mover,
    connect,
    payload_of,
    read_step,
    write_step,
)
from tests.support.network.proxies import Proxy


class Stream:
    """Workers at both ends, on threads: each step is sent once its slot is free."""

    def __init__(
        self, files: tuple[Files, Files], count: int, lane: int = 0, num_allowed: int | None = None
    ) -> None:
        """Start; after `num_allowed` steps the sender waits for `allow`, None for never."""
        self._source, self._target = (file.ring(lane=lane) for file in files)
        self._count, self._lane = count, lane
        self._committed = threading.Semaphore(LAYOUT.slots)
        self._allowed = threading.Semaphore(count if num_allowed is None else num_allowed)
        self.received = 0
        self.errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(work,), daemon=True)
            for work in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    def allow(self, num_steps: int) -> None:
        """Let the sender send further steps."""
        self._allowed.release(num_steps)

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
        assert self.errors == []
        assert self.received == self._count
        # Nothing arrives a second time, nor does anything that was not sent.
        assert sum(step is not None for step in self._target.signalled_steps) == LAYOUT.slots

    def wait_until(self, step: int) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while self.received < step and not self.errors:
            assert time.monotonic() < end
            time.sleep(0.002)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.errors.append(error)

    def _send(self) -> None:
        for step in range(self._count):
            assert self._committed.acquire(timeout=WAIT_SECONDS)
            assert self._allowed.acquire(timeout=WAIT_SECONDS)
            write_step(self._source, step, 1 + step * 7 % 64, self._value(step))

    def _receive(self) -> None:
        for step in range(self._count):
            tokens = 1 + step * 7 % 64
            data = read_step(self._target, step, tokens)
            assert data == payload_of(self._value(step), tokens * 96 * 4), step
            self.received += 1
            self._committed.release()

    def _value(self, step: int) -> int:
        return 10_000_000 * self._lane + step


@contextmanager
def movers(has_tls: bool, node_timeout: float = 5.0) -> Iterator[tuple[Mover, Mover]]:
    options: Any = {"has_tls": has_tls, "node_timeout": node_timeout}
    with Mover("head", **options) as source, Mover("other", **options) as target:
        yield source, target


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("has_tls", "target_dials", "num_lanes"),
    [
        (True, True, 2),
        pytest.param(False, False, 1, marks=pytest.mark.full),
        pytest.param(True, False, 2, marks=LONG),
    ],
)
def test_connections_that_are_reset_lose_no_step(
    has_tls: bool, target_dials: bool, num_lanes: int
) -> None:
    order = random.Random(5)
    with movers(has_tls) as (source, target):
        proxy = Proxy((source if target_dials else target).port)
        files = connect(
            source, target, target_dials=target_dials, address=proxy.address, num_lanes=num_lanes
        )
        streams = [Stream(files, 300, lane) for lane in range(num_lanes - 1)]
        last = Stream(files, 300, num_lanes - 1, num_allowed=0)
        streams.append(last)
        for _ in range(5):
            last.allow(60)
            # The last of these steps comes over a connection that was opened after the last reset.
            last.wait_until(last.received + LAYOUT.slots + 1 + order.randrange(40))
            proxy.reset()
        for stream in streams:
            stream.wait()
        assert proxy.num_connections >= 5
        # An earlier report may still wait to be read.
        link = source.wait_for(
            LinkReport,
            lambda report: (
                report.links[0].num_failures >= 5 and not report.links[0].num_queued_bytes
            ),
        ).links[0]
        assert link.is_sender
        proxy.close()


@pytest.mark.parametrize(
    ("has_tls", "num_kills"), [(True, 2), *(pytest.param(tls, 40, marks=LONG) for tls in (0, 1))]
)
def test_data_movers_that_are_killed_lose_no_step(has_tls: bool, num_kills: int) -> None:
    order = random.Random(6)
    with movers(has_tls) as (source, target):
        files = connect(source, target, num_lanes=2)
        streams = [Stream(files, 300 * num_kills, lane) for lane in range(2)]
        for number in range(num_kills):
            streams[number % 2].wait_until(300 * number + order.randrange(200))
            (source, target)[number % 2].restart()
        for stream in streams:
            stream.wait()


def test_connection_that_goes_silent_is_replaced() -> None:
    """Bytes vanish, without a reset: the ends notice, and dial again."""
    with movers(True) as (source, target):
        proxy = Proxy(target.port)
        stream = Stream(connect(source, target, address=proxy.address), 500)
        stream.wait_until(50)
        proxy.is_frozen = True
        time.sleep(0.3)
        proxy.reset()
        proxy.is_frozen = False
        stream.wait()
        proxy.close()


def test_an_edge_that_stays_disconnected_is_lost_and_can_come_back() -> None:
    with movers(True, node_timeout=0.25) as (source, target):
        proxy = Proxy(target.port)
        stream = Stream(connect(source, target, address=proxy.address), 500)
        stream.wait_until(10)
        proxy.close()
        for mover in (source, target):
            lost = mover.wait_for(LinkEdgeLost)
            assert (lost.epoch, lost.edge) == (1, 3)
            assert "no connection for" in lost.cause
        returned = Proxy(target.port, proxy.port)
        stream.wait()
        returned.close()


def test_slot_that_is_overwritten_while_it_is_resent_harms_nothing() -> None:
    """As late as possible: the receiving ring has the step, and its slot is reused meanwhile."""
    with movers(False) as (source, target):
        files = connect(source, target)
        out, into = files[0].ring(), files[1].ring()
        for step in range(3):
            write_step(out, step, 64, step)
            assert read_step(into, step, 64) == payload_of(step, 64 * 96 * 4)
        # Step 4 has slot 0: half of it is written when the data mover resends its slots.
        begin = out.payload(4)
        out.memory[begin : begin + 1000] = b"x" * 1000
        source.restart()
        write_step(out, 3, 64, 3)
        assert read_step(into, 3, 64) == payload_of(3, 64 * 96 * 4)
        assert into.signalled_steps == [0, 1, 2, 3]
        begin = into.payload(0)
        assert into.memory[begin : begin + 1000] == payload_of(0, 1000)
        write_step(out, 4, 64, 4)
        assert read_step(into, 4, 64) == payload_of(4, 64 * 96 * 4)


@LONG
def test_a_restarted_data_mover_leaves_no_descriptors_behind() -> None:
    with movers(False) as (source, target):
        files = connect(source, target)
        before = len(os.listdir(f"/proc/{target.process.pid}/fd"))
        ring: Ring = files[0].ring()
        into = files[1].ring()
        for step in range(3):
            source.restart()
            write_step(ring, step, 2, step)
            assert read_step(into, step, 2) == payload_of(step, 2 * 96 * 4)
        assert len(os.listdir(f"/proc/{target.process.pid}/fd")) <= before + 1


def move_steps(source: Ring, target: Ring, first: int, count: int, seed: int) -> None:
    """Send and receive steps of random sizes, some of them failed, as many in flight as fit."""
    order, sent, received = random.Random(seed), first, first
    sizes = {step: order.randrange(1, 65) for step in range(first, first + count)}
    failed = {step for step in sizes if order.random() < 0.1}
    while received < first + count:
        can_send = sent < min(first + count, received + LAYOUT.slots)
        if can_send and (received == sent or order.random() < 0.6):
            write_step(source, sent, sizes[sent], sent, f"step {sent}" if sent in failed else "")
            sent += 1
        elif received in failed:
            with pytest.raises(StepFailedError, match=f"^step {received}$"):
                target.wait(received, sizes[received])
            received += 1
        else:
            size = sizes[received] * 96 * 4
            data = read_step(target, received, sizes[received])
            assert data == payload_of(received, size)
            received += 1


@pytest.mark.parametrize(
    ("has_tls", "target_dials"),
    [
        (True, False),
        pytest.param(False, True, marks=pytest.mark.full),
        pytest.param(True, True, marks=pytest.mark.long),
        pytest.param(False, False, marks=pytest.mark.long),
    ],
)
def test_steps_arrive_as_they_were_sent(has_tls: bool, target_dials: bool) -> None:
    with Mover("head", has_tls) as source, Mover("other", has_tls) as target:
        files = connect(source, target, target_dials=target_dials)
        move_steps(files[0].ring(), files[1].ring(), 0, 150, 1)
        transport = "tcp+tls" if has_tls else "tcp"
        for mover, peer in ((source, "other"), (target, "head")):
            report = mover.wait_for(
                LinkReport, lambda report: report.links[0].num_bytes > 1_000_000
            )
            link = report.links[0]
            assert (link.edge, link.peer, link.transport, link.is_open) == (
                3,
                peer,
                transport,
                True,
            )
            assert report.num_malformed == 0
            assert report.refused == {}


def test_machine_without_a_data_port_receives_by_dialing() -> None:
    with Mover("head") as source, Mover("behind-nat", listen="") as target:
        assert target.port == 0
        files = connect(source, target, target_dials=True)
        move_steps(files[0].ring(), files[1].ring(), 0, 20, 2)


def test_edges_of_several_epochs_do_not_mix() -> None:
    with Mover("head") as source, Mover("other") as target:
        old = connect(source, target, epoch=1, edge=0)
        new = connect(source, target, epoch=2, edge=0)
        rings = [files.ring() for files in (*old, *new)]
        write_step(rings[0], 0, 5, 1)
        write_step(rings[2], 0, 5, 2)
        assert read_step(rings[1], 0, 5) == payload_of(1, 5 * 96 * 4)
        assert read_step(rings[3], 0, 5) == payload_of(2, 5 * 96 * 4)
        for mover in (source, target):
            mover.wait_for(LinkReport, lambda report: len(report.links) == 2)
            mover.send(CloseLinkEdges(1))
            mover.wait_for(LinkReport, lambda report: len(report.links) == 1)
        move_steps(rings[2], rings[3], 1, 20, 3)


def test_messages_wait_for_a_parent_that_does_not_read() -> None:
    own, parent = create_channels()
    outbox, num_sent = Outbox(own), 0
    while outbox.flush():
        outbox.send(LinkEdgeLost(num_sent, 0, "x" * 1000))
        num_sent += 1
    assert not outbox.flush()
    received = []
    for number in range(num_sent):
        received.append(decode_link_message(parent.receive()[0]))
        # The last message is sent once there is space.
        assert outbox.flush() or number < num_sent - 1
    assert received == [LinkEdgeLost(each, 0, "x" * 1000) for each in range(num_sent)]
    own.close()
    parent.close()


def test_rings_that_differ_are_an_error_that_names_them() -> None:
    with Mover("head") as source, Mover("other") as target:
        sent, received = connect(source, target)
        received.ring(EdgeLayout(slots=4, max_tokens=64, hidden_size=128, itemsize=4))
        write_step(sent.ring(), 0, 1, 1)
        lost = target.wait_for(LinkEdgeLost)
        assert (lost.epoch, lost.edge) == (1, 3)
        assert "hidden_size=96" in lost.cause
        assert "hidden_size=128" in lost.cause
        assert "hidden_size=128" in source.wait_for(LinkEdgeLost).cause
