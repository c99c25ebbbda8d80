"""Checks of the way to the head, on loopback."""

import socket
from contextlib import ExitStack

import pytest

from gllm.deploy.doctor import network_checks
from gllm.deploy.doctor.finding import Verdict


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def filtered_port():
    """A port that does not answer: the queue of its connections is full."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield server.getsockname()[1]


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_names():
    finding, address = network_checks.check_host_name("127.0.0.1", 1)
    assert (finding.verdict, address) == (Verdict.GOOD, "127.0.0.1")
    finding, address = network_checks.check_host_name("localhost", 1)
    assert finding.verdict == Verdict.GOOD
    assert address in finding.text
    finding, address = network_checks.check_host_name("no-such-host.invalid", 1)
    assert (finding.verdict, address) == (Verdict.BAD, "")
    assert "/etc/hosts" in finding.fix


def test_routes():
    finding, own = network_checks.check_route("127.0.0.1", 1)
    assert (finding.verdict, own) == (Verdict.GOOD, "127.0.0.1")

    def fail(address, port):
        raise OSError(101, "Network is unreachable")

    finding, own = network_checks.check_route("192.0.2.1", 1, fail)
    assert (finding.verdict, own) == (Verdict.BAD, "")
    assert "ip route get 192.0.2.1" in finding.fix


def test_secret_off_loopback():
    assert network_checks.check_secret_is_needed("127.0.0.1", False) is None
    assert network_checks.check_secret_is_needed("192.0.2.1", True) is None
    finding = network_checks.check_secret_is_needed("192.0.2.1", False)
    assert finding is not None
    assert "gllm node --new-secret" in finding.fix


def test_port_of_the_head(listener, filtered_port):
    port = listener.getsockname()[1]
    assert network_checks.check_head_port("127.0.0.1", port).verdict == Verdict.GOOD
    refused = network_checks.check_head_port("127.0.0.1", closed_port())
    assert "refuses connections" in refused.text
    assert "--node-rank 0" in refused.fix
    filtered = network_checks.check_head_port("127.0.0.1", filtered_port, 0.3)
    assert "firewall" in filtered.text
    assert f"ufw allow {filtered_port}/tcp" in filtered.fix


def test_data_port_of_the_head(listener, filtered_port):
    port = listener.getsockname()[1]
    assert network_checks.check_data_port_of_head("127.0.0.1", port).verdict == Verdict.GOOD
    refused = network_checks.check_data_port_of_head("127.0.0.1", closed_port())
    assert refused.verdict == Verdict.NOTE
    filtered = network_checks.check_data_port_of_head("127.0.0.1", filtered_port, 0.3)
    assert filtered.verdict == Verdict.BAD
    assert "--data-port 0" in filtered.fix


def test_own_data_port(listener):
    port = listener.getsockname()[1]
    taken = network_checks.check_data_port("127.0.0.1", port)
    assert taken.verdict == Verdict.BAD
    assert f"sport = :{port}" in taken.fix
    assert network_checks.check_data_port("127.0.0.1", closed_port()).verdict == Verdict.GOOD
    assert network_checks.check_data_port("127.0.0.1", 0).verdict == Verdict.NOTE
    foreign = network_checks.check_data_port("192.0.2.1", closed_port())
    assert foreign.verdict == Verdict.BAD
