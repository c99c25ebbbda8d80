"""Who may join an engine of several machines, and what others see. All marked `long`."""

import asyncio
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import zmq

from benchmarks.net.capture import Capture
from benchmarks.net.rig import Hop, NamespaceRig, Rig, unsupported_reason
from gllm.messages.codec import decode_for_agent
from gllm.messages.nodes import PROTOCOL, JoinCluster, NodeFacts, RefuseNode
from gllm.runtime.messaging.bus import Spoke
from gllm.runtime.messaging.security import SecretFile
from gllm.transport.link.frames import MAGIC, VERSION
from tests.support.network.plaintext import RUN_BYTES, runs_of
from tests.support.servers.nodes import DATA_PORT, HEAD_PORT, Cluster, running_cluster
from tests.support.servers.recovery_load import COMPLETIONS, Answer, Load, compare, load_during
from tests.support.servers.server import wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason())),
]
BODY = {"prompt": "The owl said", "temperature": 0, "ignore_eos": True, "max_tokens": 8}
HIDDEN_BYTES = 768
"""Activations of the demo per token, in float32."""


@pytest.fixture(scope="module")
def rig() -> Iterator[NamespaceRig]:
    """Three machines, and one for a spare or a forwarder."""
    with NamespaceRig(4) as machines:
        yield machines


@pytest.fixture
def cluster(rig: NamespaceRig, tmp_path: Path) -> Iterator[Cluster]:
    """Machines 0 to 2 with a stage each."""
    with running_cluster(rig, tmp_path, 3, "--pp", "3") as started:
        yield started


def test_another_secret_is_named(rig: NamespaceRig, tmp_path: Path) -> None:
    cluster = Cluster(rig, tmp_path, 2, "--pp", "2", "--join-timeout", "20")
    other = ["--node-secret-file", str(cluster.make_secret("other"))]
    try:
        head, agent = cluster.start(0), cluster.start(1, "--join-timeout", "12", security=other)
        code, log = agent.end()
        assert code != 0
        assert "secret" in log
        code, log = head.end()
        assert code == 1
        assert rig.addresses[1] in log
        assert "secret" in log
    finally:
        cluster.close()


def test_another_model_is_refused(rig: NamespaceRig, tmp_path: Path, tiny_model: Path) -> None:
    cluster = Cluster(rig, tmp_path, 2, "--pp", "2", "--join-timeout", "60")
    try:
        cluster.start(0)
        code, log = cluster.start(1, model=str(tiny_model)).end()
        assert code == 2
        assert "model of the node" in log
        assert "Traceback" not in log
        # The head waits on, and a node with the right model completes the cluster.
        cluster.start(1)
        cluster.wait_until_ready()
    finally:
        cluster.close()


def test_other_flags_are_listed_field_by_field(rig: NamespaceRig, tmp_path: Path) -> None:
    cluster = Cluster(rig, tmp_path, 2, "--pp", "2", "--join-timeout", "60")
    try:
        cluster.start(0)
        flags = ("--max-model-len", "128", "--max-num-seqs", "3")
        code, log = cluster.start(1, *flags).end()
        assert code == 2
        assert "max_model_len" in log or "max-model-len" in log
        assert "max_num_seqs" in log or "max-num-seqs" in log
    finally:
        cluster.close()


def make_join(protocol: int, version: str, address: str) -> JoinCluster:
    facts = NodeFacts("other", "Linux", version, address, 0, "", b"", [], 1, 2**30)
    return JoinCluster(protocol, "other", 1, 1, False, "", b"", facts)


@pytest.mark.parametrize(("protocol", "version"), [(PROTOCOL + 1, "999.0"), (PROTOCOL, "999.0")])
async def test_another_version_is_refused(cluster: Cluster, protocol: int, version: str) -> None:
    keys = SecretFile(cluster.security[1]).keys[0]
    answers: list[object] = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"tcp://{cluster.rig.addresses[0]}:{HEAD_PORT}"
    with cluster.rig.inside(3):
        # ZeroMQ's I/O thread, which connects, begins with the context's first socket.
        spoke = Spoke(context, 0, 2**61 + 5, address, decode_for_agent, keys)
    spoke.start(answers.extend, answers.append)
    spoke.send(make_join(protocol, version, cluster.rig.addresses[3]))
    try:
        async with asyncio.timeout(60):
            while not answers:
                await asyncio.sleep(0.01)
    finally:
        spoke.close()
        context.destroy()
    refusal = answers[0]
    assert isinstance(refusal, RefuseNode)
    assert "999.0" in refusal.cause
    assert "install" in refusal.cause


def test_a_stranger_in_the_network_gets_nothing(rig: NamespaceRig, cluster: Cluster) -> None:
    """A machine without the secret cannot even learn that HTTP requests are served."""

    def ask(machine: int, port: int) -> None:
        with rig.inside(3), socket.create_connection((rig.addresses[machine], port), 10) as end:
            end.sendall(b"GET /nodes HTTP/1.1\r\n\r\n")
            end.settimeout(20)
            with suppress(ConnectionError):
                assert b"machine" not in end.recv(1000)

    def is_counted() -> bool:
        # A hub that was busy may learn of a connection after its end, when its address is gone.
        ask(0, HEAD_PORT)
        return rig.addresses[3] in cluster.head.get("/nodes")["refused_peers"]

    for machine in (1, 2):
        ask(machine, DATA_PORT)
    wait_until(is_counted)


def test_a_machine_with_a_revoked_secret_is_locked_out(
    rig: NamespaceRig, tmp_path: Path, expected: dict[str, Answer]
) -> None:
    """The others get a new secret while they serve: requests go on without the third machine."""
    cluster = Cluster(rig, tmp_path, 3, "--pp", "3")
    files = [cluster.make_secret(f"secret-{machine}") for machine in range(3)]
    for path in files[1:]:
        shutil.copy2(files[0], path)
    try:
        for rank, path in enumerate(files):
            cluster.start(rank, security=["--node-secret-file", str(path)])
        cluster.wait_until_ready()
        load = load_during(cluster.head, "revoked")
        new = cluster.make_secret("new")
        for path in (files[2], files[0]):
            copy = path.with_suffix(".copy")
            shutil.copy2(new, copy)
            copy.replace(path)
        compare(load.wait(), expected)
        rows = cluster.nodes()
        assert rows["machine-1"]["state"] == "lost"
        assert rows["machine-0"]["stages"] + rows["machine-2"]["stages"] == [0, 1]
        assert rig.addresses[1] in cluster.head.get("/nodes")["refused_peers"]
        compare(Load(cluster.head, "afterwards").wait(), expected)
        assert cluster.nodes()["machine-1"]["state"] == "lost"
    finally:
        cluster.close()


class SharedMachine:
    """One machine in the place of all: nodes reach each other over its loopback device."""

    def __init__(self, rig: NamespaceRig) -> None:
        self.addresses = ["127.0.0.1"] * 2
        self._rig = rig

    def popen(self, machine: int, command: Sequence[str], **options: Any) -> "Popen[Any]":
        return self._rig.popen(0, command, **options)

    def inside(self, machine: int) -> AbstractContextManager[None]:
        return self._rig.inside(0)

    def reach(self, machine: int, port: int, source: int | None = None) -> str:
        return f"127.0.0.1:{port}"

    def hop(self, machine: int) -> Hop:
        return self._rig.hop(0)


def serve_captured(
    rig: Rig, folder: Path, has_secret: bool, namespace: str, device: str
) -> tuple[bytes, str]:
    """Return what passes a device while two machines serve a prompt, and the output."""
    folder.mkdir()
    with Capture(namespace, device, folder / "packets") as capture:
        with running_cluster(rig, folder, 2, "--pp", "2", has_secret=has_secret) as cluster:
            body = {**BODY, "prompt": "A hedgehog and a lighthouse keeper", "max_tokens": 60}
            status, answer = cluster.head.post(COMPLETIONS, body)
            assert status == 200
        time.sleep(0.5)
        return capture.close(), answer["choices"][0]["text"]


def test_the_wire_shows_no_plaintext(tmp_path: Path) -> None:
    """No run of 16 bytes of an unencrypted capture is found in the encrypted one.

    The same machines, prompt and model without a secret on the loopback device of one machine give
    messages and activations in the clear, byte for byte.
    """
    with NamespaceRig(2, shaped=[]) as rig:
        shared = SharedMachine(rig)
        plain, text = serve_captured(shared, tmp_path / "plain", False, rig.namespaces[0], "lo")
        secret, same = serve_captured(rig, tmp_path / "secret", True, rig.router, "machine1")
    assert same == text
    assert text.encode()[:RUN_BYTES] in plain
    assert b"hedgehog and a l" in plain
    # Frames of activations have this header.
    assert plain.count(MAGIC + bytes([VERSION])) >= 60
    assert len(secret) > 60 * HIDDEN_BYTES
    assert not runs_of(plain) & runs_of(secret)
