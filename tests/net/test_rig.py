"""The rig itself: rates, delays, cuts, losses, captures, and nothing left at its end."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.net import namespaces
from benchmarks.net.capture import Capture
from benchmarks.net.rig import LoopbackRig, NamespaceRig, unsupported_reason

needs_namespaces = pytest.mark.skipif(
    unsupported_reason() is not None, reason=str(unsupported_reason())
)
Machines = NamespaceRig | LoopbackRig


@pytest.fixture(params=[pytest.param(NamespaceRig, marks=needs_namespaces), LoopbackRig])
def rig(request: pytest.FixtureRequest) -> Iterator[Machines]:
    with request.param(2) as machines:
        yield machines


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


@pytest.fixture
def pair(rig: Machines) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection from machine 1 to machine 0: its two ends."""
    with rig.inside(0):
        listener = socket.create_server((rig.addresses[0], 0))
    address = rig.reach(0, listener.getsockname()[1], source=1)
    with rig.inside(1):
        client = socket.create_connection(split(address), timeout=60)
    server, _ = listener.accept()
    server.settimeout(60)
    yield client, server
    for each in (client, server, listener):
        each.close()


def send_all(sender: socket.socket, receiver: socket.socket, num_bytes: int) -> float:
    """Return the seconds until all bytes have arrived."""
    begin = time.monotonic()
    thread = threading.Thread(target=sender.sendall, args=(bytes(num_bytes),))
    thread.start()
    while num_bytes:
        num_bytes -= len(receiver.recv(2**20))
    thread.join()
    return time.monotonic() - begin


def round_trip(pair: tuple[socket.socket, socket.socket]) -> float:
    client, server = pair
    return send_all(client, server, 1) + send_all(server, client, 1)


def test_delay_and_rate(rig: Machines, pair: tuple[socket.socket, socket.socket]) -> None:
    num_bytes = 400_000
    fast = send_all(*pair, num_bytes)
    rig.hop(1).set_delay(0.04)
    assert min(round_trip(pair) for _ in range(3)) >= 0.08
    rig.hop(1).set_delay(0)
    rig.hop(1).set_rate(8e6)
    slow = send_all(*pair, num_bytes)
    # The proxy's first 64 KiB may wait in the kernel's buffers.
    assert slow >= 0.8 * 0.4
    assert slow > fast
    rig.hop(1).set_rate(0)
    assert min(round_trip(pair) for _ in range(3)) < 0.08 + 0.4


@pytest.mark.full
def test_a_cut_is_silent_and_ends(rig: Machines, pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    round_trip(pair)
    rig.hop(1).cut()
    client.sendall(b"late")
    server.settimeout(0.3)
    with pytest.raises(TimeoutError):
        server.recv(4)
    rig.hop(1).restore()
    server.settimeout(60)
    assert server.recv(4) == b"late"
    assert round_trip(pair) < 60


@pytest.mark.full
def test_a_reset_reaches_both_ends() -> None:
    with LoopbackRig(2) as rig, socket.create_server((rig.addresses[0], 0)) as listener:
        address = split(rig.reach(0, listener.getsockname()[1], source=1))
        with socket.create_connection(address, timeout=60) as client:
            server, _ = listener.accept()
            with server:
                server.settimeout(60)
                client.sendall(b"a")
                assert server.recv(1) == b"a"
                rig.hop(0).reset()
                for end in (client, server):
                    with suppress(ConnectionResetError):
                        assert end.recv(1) == b""


@pytest.mark.full
def test_corruption_flips_bits() -> None:
    with LoopbackRig(2) as rig, socket.create_server((rig.addresses[0], 0)) as listener:
        rig.hop(1).set_corruption(1)
        address = split(rig.reach(0, listener.getsockname()[1], source=1))
        with socket.create_connection(address, timeout=60) as client:
            server, _ = listener.accept()
            with server:
                client.sendall(bytes(100))
                received = server.recv(100)
                assert sum(map(int.bit_count, received)) == 1


@pytest.mark.full
@needs_namespaces
def test_losses_are_counted_and_repaired_by_tcp() -> None:
    with NamespaceRig(2) as rig, rig.inside(0):
        listener = socket.create_server((rig.addresses[0], 0))
        rig.hop(0).set_loss(0.05)
        with rig.inside(1):
            client = socket.create_connection(listener.getsockname(), timeout=60)
        server, _ = listener.accept()
        send_all(client, server, 2_000_000)
        counters = rig.hop(0).counters()
        lost = sum(each["lost"] for each in counters.values())
        passed = sum(each["packets"] for each in counters.values())
        assert 0.01 < lost / (lost + passed) < 0.2
        assert counters["ba"]["bytes"] > 2_000_000
        for each in (client, server, listener):
            each.close()


@pytest.mark.full
@needs_namespaces
def test_jitter_delays_each_packet_anew_and_keeps_the_order() -> None:
    with NamespaceRig(2, shaped=[1]) as rig:
        receiver = udp_socket(rig, 0)
        sender = udp_socket(rig, 1)
        rig.hop(1).set_delay(0.01)
        rig.hop(1).set_jitter(0.02)
        seconds, numbers = [], []
        for number in range(60):
            sent = time.monotonic()
            sender.sendto(bytes([number]), receiver.getsockname())
            if number >= 30:
                continue  # The second half travels at once.
            numbers.append(receiver.recv(1)[0])
            seconds.append(time.monotonic() - sent)
        numbers += [receiver.recv(1)[0] for _ in range(30)]
        receiver.close()
        sender.close()
    assert numbers == list(range(60))
    assert min(seconds) >= 0.01
    # The mean is 20 ms and the standard deviation 5.8 ms on an idle machine.
    assert max(seconds) - min(seconds) > 0.008


def udp_socket(rig: NamespaceRig, machine: int) -> socket.socket:
    """A datagram socket on a machine."""
    with rig.inside(machine):
        created = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        created.bind((rig.addresses[machine], 0))
    created.settimeout(60)
    return created


@pytest.mark.full
@needs_namespaces
def test_behind_a_firewall_connections_are_dialed_outwards_only() -> None:
    with NamespaceRig(2, shaped=[1]) as rig:
        listeners = []
        for machine in range(2):
            with rig.inside(machine):
                listeners.append(socket.create_server((rig.addresses[machine], 0)))
        rig.hop(1).block_inbound()
        inwards, outwards = listeners[1].getsockname(), listeners[0].getsockname()
        with rig.inside(0), pytest.raises(TimeoutError):
            socket.create_connection(inwards, timeout=0.2)
        assert rig.hop(1).counters()["ba"]["blocked"] >= 1
        with rig.inside(1):
            client = socket.create_connection(outwards, timeout=60)
        server, _ = listeners[0].accept()
        round_trip((client, server))
        rig.hop(1).admit_inbound()
        with rig.inside(0):
            socket.create_connection(inwards, timeout=60).close()
        assert rig.hop(1).counters()["ab"]["blocked"] == 0
        for each in (client, server, *listeners):
            each.close()


@pytest.mark.full
@needs_namespaces
def test_a_shaper_that_waits_uses_no_cpu() -> None:
    with NamespaceRig(1) as rig:
        rig.hop(0).set_rate(1e6)
        pid = rig.hop(0).pid
        rig.hop(0).counters()
        before = Path(f"/proc/{pid}/stat").read_text().split()[13:15]
        time.sleep(0.5)
        after = Path(f"/proc/{pid}/stat").read_text().split()[13:15]
        assert sum(map(int, after)) - sum(map(int, before)) <= 1


@pytest.mark.full
@needs_namespaces
def test_capture_sees_what_passes(tmp_path: Path) -> None:
    with NamespaceRig(2, shaped=[]) as rig, rig.inside(0):
        listener = socket.create_server((rig.addresses[0], 0))
        with Capture(rig.router, "machine1", tmp_path / "packets") as capture:
            with rig.inside(1):
                client = socket.create_connection(listener.getsockname(), timeout=60)
            server, _ = listener.accept()
            secret = os.urandom(5000)
            client.sendall(secret)
            received = b""
            while len(received) < len(secret):
                received += server.recv(2**16)
            for each in (client, server, listener):
                each.close()
            time.sleep(0.2)
        assert secret in capture.close()
        assert os.urandom(16) not in capture.close()


@needs_namespaces
def test_nothing_is_left() -> None:
    with NamespaceRig(2) as rig:
        names = [rig.router, *rig.namespaces]
        process = rig.popen(1, ["sleep", "1000"])
        shaper = rig.hop(0).pid
        while rig.pids(1) != [process.pid]:
            time.sleep(0.01)
    assert process.wait() != 0
    assert not any((namespaces.NAMESPACES / name).exists() for name in names)
    assert not Path(f"/proc/{shaper}").exists()


@pytest.mark.full
@needs_namespaces
def test_what_a_killed_rig_left_is_removed_at_the_next_start() -> None:
    code = (
        "import os; from benchmarks.net.rig import NamespaceRig\n"
        "rig = NamespaceRig(1).__enter__(); rig.popen(0, ['sleep', '1000'], stdout=-3, stderr=-3)\n"
        "while not rig.pids(0): pass\n"
        "print(rig.namespaces[0], rig.pids(0)[0], rig.hop(0).pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    name, sleeper, shaper = done.stdout.split()
    with NamespaceRig(1):
        assert not (namespaces.NAMESPACES / name).exists()
        deadline = time.monotonic() + 60
        while any(is_running(pid) for pid in (sleeper, shaper)):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
