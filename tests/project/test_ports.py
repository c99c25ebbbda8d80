"""Ports that tests hand out before somebody listens there."""

import socket

from tests.support.network.ports import FIRST, NUM_PORTS, NUM_WORKERS, PortRange


def test_ports_are_handed_out_once() -> None:
    ranges = [PortRange(worker) for worker in range(NUM_WORKERS)]
    ports = [port for each in ranges for _ in range(3) for port in each.pop(12)]
    assert len(set(ports)) == len(ports) == 36 * NUM_WORKERS
    assert FIRST <= min(ports) < max(ports) < FIRST + NUM_PORTS


def test_a_port_in_use_is_left_out() -> None:
    usual = PortRange(0).pop(12)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", usual[3]))
        row = PortRange(0).pop(12)
    assert usual[3] not in row
    assert row == list(range(row[0], row[0] + 12))
