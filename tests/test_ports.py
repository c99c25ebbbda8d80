"""Ports that tests hand out before somebody listens there."""

import socket
from pathlib import Path

from tests.ports import FIRST, NUM_PORTS, NUM_WORKERS, PortRange


def test_ports_are_handed_out_once_and_by_no_one_else() -> None:
    ranges = [PortRange(worker) for worker in range(NUM_WORKERS)]
    ports = [port for each in ranges for _ in range(3) for port in each.pop(12)]
    assert len(set(ports)) == len(ports) == 36 * NUM_WORKERS
    assert min(ports) >= FIRST
    lowest, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert max(ports) < FIRST + NUM_PORTS <= int(lowest)


def test_a_port_in_use_is_left_out() -> None:
    ports = PortRange(0)
    (port,) = ports.pop(1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 3))
        row = ports.pop(12)
    assert port + 3 not in row
    assert row == list(range(row[0], row[0] + 12))
