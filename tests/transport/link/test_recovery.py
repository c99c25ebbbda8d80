"""Connections break and data movers are killed in mid-stream: no step is lost or repeated."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gllm.transport.link.commands import LinkEdgeLost, LinkReport
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

    def __init__(self, files: tuple[Files, Files], count: int, lane: int = 0) -> None:
        self._source, self._target = (each.ring(lane=lane) for each in files)
        self._count, self._lane = count, lane
        self._committed = threading.Semaphore(LAYOUT.slots)
        self.received = 0
        self.errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(work,), daemon=True)
            for work in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()

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
        streams = [Stream(files, 300, lane) for lane in range(num_lanes)]
        for cut in range(5):
            streams[-1].wait_until(50 * cut + order.randrange(40))
            proxy.reset()
        for stream in streams:
            stream.wait()
        assert proxy.num_connections >= 5
        # An earlier report may still wait to be read.
        link = source.wait_for(
            LinkReport,
            lambda each: each.links[0].num_failures >= 5 and not each.links[0].num_queued_bytes,
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
            assert (lost.generation, lost.edge) == (1, 3)
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
