"""Two data movers move steps between rings: contents, order, errors, whoever dials."""

import random

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
    Mover,
    connect,
    payload_of,
    read_step,
    write_step,
)


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
            report = mover.wait_for(LinkReport, lambda each: each.links[0].num_bytes > 1_000_000)
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


def test_edges_of_several_generations_do_not_mix() -> None:
    with Mover("head") as source, Mover("other") as target:
        old = connect(source, target, generation=1, edge=0)
        new = connect(source, target, generation=2, edge=0)
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
        assert (lost.generation, lost.edge) == (1, 3)
        assert "hidden_size=96" in lost.cause
        assert "hidden_size=128" in lost.cause
        assert "hidden_size=128" in source.wait_for(LinkEdgeLost).cause
