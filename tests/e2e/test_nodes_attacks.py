"""A port that anyone can reach: the hub of the nodes serves on, whatever strangers send."""

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec
import pytest
import zmq

from benchmarks.net.rig import LoopbackRig
from gllm.messages.codec import encode
from gllm.messages.lifecycle import Hello
from gllm.messages.nodes import PROTOCOL, JoinCluster, NodeFacts, NodeHeartbeat, WorkerFrame
from gllm.runtime.messaging.security import KeyPair, SecretFile
from gllm.runtime.messaging.session import HEADER
from tests.support.servers.metrics import scrape
from tests.support.servers.nodes import Cluster, running_cluster
from tests.support.servers.recovery_load import Answer, Load, compare
from tests.support.servers.server import alive, wait_until

pytestmark = pytest.mark.long

NUM_STRANGERS = 2_000
"""Connections that never finish a handshake."""
NUM_MEMBERS = 500
"""Connections that have the secret and send malformed frames."""
FRAMES_PER_MEMBER = 250
NUM_IN_PARALLEL = 25
MAX_GROWTH_BYTES = 8 * 2**20
"""Largest growth of the head's memory by one stranger."""
FLOOD_BYTES = 64 * 2**20
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
"""Signature and version of ZMTP; the mechanism, the role and zeros follow."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes on addresses of the loopback device."""
    folder = tmp_path_factory.mktemp("attacked")
    with LoopbackRig(2) as rig, running_cluster(rig, folder, 2, "--pp", "2") as started:
        yield started


def greeting(mechanism: bytes) -> bytes:
    return GREETING + mechanism.ljust(20, b"\0") + bytes(32)


def stranger_bytes(kind: int, chooser: Random) -> bytes:
    """Bytes of a peer that cannot finish a handshake."""
    garbage = chooser.randbytes(chooser.randrange(1, 500))
    return (
        garbage,
        greeting(b"NULL") + b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x06DEALER" + garbage,
        greeting(b"PLAIN") + b"\x04\x0b\x05HELLO\x01a\x01b",
        greeting(b"CURVE") + b"\x04\xc8\x05HELLO\x01\0" + chooser.randbytes(192),
        greeting(b"CURVE") + b"\x06" + struct.pack(">Q", 2**40) + garbage,
        greeting(b"CURVE")[: chooser.randrange(1, 64)],
    )[kind % 6]


def member_frames(chooser: Random) -> list[bytes]:
    """Frames of a peer that has the secret: none of them may come first."""
    facts = NodeFacts("x", "Linux", "0", "127.0.0.1", 0, "", b"", [], 1, 1)
    join = encode(JoinCluster(PROTOCOL, "x", 1, 1, False, "", b"", facts))
    header = HEADER.pack(0, 0, 0, 0)
    heartbeat = NodeHeartbeat(0.0, 0.0, 0.0)
    kinds = (
        chooser.randbytes(chooser.randrange(60)),
        header,
        header + chooser.randbytes(100),
        header + join[: chooser.randrange(1, len(join))],
        header + encode(heartbeat),
        header + encode(WorkerFrame(1, 1, b"\x93")),
        HEADER.pack(0, 0, chooser.randrange(2**32), 0) + encode(Hello(5)),
        HEADER.pack(chooser.randrange(2**64), 0, 0, 0) + encode(Hello(5)),
        HEADER.pack(0, 0, 0, 2**32 - 1) + encode(Hello(5)),
        header + msgspec.msgpack.encode(["JoinCluster", *range(20)]),
    )
    return [chooser.choice(kinds) for _ in range(FRAMES_PER_MEMBER)]


def num_refused(cluster: Cluster) -> int:
    """Connections that the head has refused, by all addresses."""
    return sum(cluster.head.get("/nodes")["refused_peers"].values())


def address(cluster: Cluster) -> tuple[str, int]:
    return cluster.rig.addresses[0], cluster.head_port


def test_malformed_frames_on_the_hub_are_counted(
    cluster: Cluster, expected: dict[str, Answer]
) -> None:
    """10^5 malformed frames: no crash, no loss, and the requests of clients go on.

    Each connection is counted as refused exactly once: of strangers without a handshake as well as
    of peers that have the secret. The hub closes a connection for its first malformed frame, and
    frames that were not read by then are lost with it. So the count of malformed frames is that of
    the frames that were read, without those of another run, which count as stale.
    """
    chooser, before = Random(1), num_refused(cluster)
    pids = cluster.pids()
    load = Load(cluster.head, "attacked")
    for begin in range(0, NUM_STRANGERS, NUM_IN_PARALLEL):
        send_strangers(cluster, range(begin, begin + NUM_IN_PARALLEL), chooser)
    wait_until(lambda: num_refused(cluster) - before >= NUM_STRANGERS)
    keys = SecretFile(cluster.security[1]).keys[0]
    num_malformed = scrape(cluster.head).values["malformed_frames_total"]
    num_sent = 0
    for _ in range(0, NUM_MEMBERS, NUM_IN_PARALLEL):
        num_sent += send_members(cluster, keys, chooser)
    assert num_sent >= 100_000
    wait_until(lambda: num_refused(cluster) - before >= NUM_STRANGERS + NUM_MEMBERS)
    num_malformed = scrape(cluster.head).values["malformed_frames_total"] - num_malformed
    print(f"{num_sent} frames sent with the secret, {num_malformed:.0f} read and counted")
    assert NUM_MEMBERS / 2 <= num_malformed <= num_sent
    compare(load.wait(), expected)
    compare(Load(cluster.head, "afterwards").wait(), expected)
    assert num_refused(cluster) - before == NUM_STRANGERS + NUM_MEMBERS
    assert cluster.pids() == pids
    assert "Traceback" not in cluster.head.log
    assert cluster.nodes()["machine-1"]["num_losses"] == 0


def send_strangers(cluster: Cluster, kinds: range, chooser: Random) -> None:
    """Open connections, send bytes of each kind, and wait for their ends."""
    ends = [socket.create_connection(address(cluster), 60) for _ in kinds]
    for kind, end in zip(kinds, ends, strict=True):
        with suppress(OSError):
            end.sendall(stranger_bytes(kind, chooser))
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_WR)
            while end.recv(2**16):
                pass
        end.close()


def send_members(cluster: Cluster, keys: KeyPair, chooser: Random) -> int:
    """Send frames over connections that have the secret until the hub closes them.

    Returns:
        number of frames that were sent.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ends, num_sent = [], 0
    for _ in range(NUM_IN_PARALLEL):
        end = context.socket(zmq.DEALER)
        end.curve_serverkey = end.curve_publickey = keys.public
        end.curve_secretkey = keys.secret
        end.reconnect_ivl = -1
        end.linger = 0
        closed = end.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        frames = member_frames(chooser)
        end.connect("tcp://{}:{}".format(*address(cluster)))
        # A socket whose only connection was closed has nowhere to send to: it would wait for ever.
        with suppress(zmq.Again):
            for frame in frames:
                end.send(frame, zmq.NOBLOCK)
                num_sent += 1
        ends.append((end, closed))
    for end, closed in ends:
        assert closed.poll(60_000), "the hub keeps the connection"
        end.disable_monitor()
        closed.close()
        end.close()
    context.term()
    return num_sent


def resident_bytes(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


@pytest.mark.parametrize("opening", [b"", greeting(b"CURVE"), greeting(b"NULL")])
def test_a_flood_before_the_handshake_costs_little(cluster: Cluster, opening: bytes) -> None:
    pid = cluster.head.pid
    cluster.head.get("/nodes")
    before = resident_bytes(pid, "VmRSS")
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # Resets the maximum.
    frame = b"\x02" + struct.pack(">Q", FLOOD_BYTES)
    with socket.create_connection(address(cluster), 60) as end:
        with suppress(OSError):
            end.settimeout(5)
            end.sendall(opening + frame)
            chunk = os.urandom(2**20)
            for _ in range(FLOOD_BYTES // len(chunk)):
                end.sendall(chunk)
        time.sleep(1)
        assert resident_bytes(pid, "VmHWM") - before <= MAX_GROWTH_BYTES
    assert alive(pid)
    assert cluster.head.status("/ready") == 200
