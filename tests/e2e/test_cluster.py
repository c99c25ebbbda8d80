"""`gllm cluster` and two nodes on loopback: a service of both, its key, its end, its death."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.net.rig import LoopbackRig
from gllm.runtime.messaging.security import create_secret_file
from tests.support.network.ports import free_port_row
from tests.support.servers.nodes import NodeServer, descendants
from tests.support.servers.server import DEADLINE, alive, wait_until

KEY = "key-of-the-cluster"
PARAMETERS = {"max_model_len": 128, "kv_cache_memory": 2**24, "dtype": "float32"}


class ClusterProcesses:
    """A master and its nodes, as a user starts them."""

    def __init__(self, folder: Path) -> None:
        create_secret_file(folder / "secret")
        (folder / "keys").write_text(KEY)
        self._folder = folder
        self._ports = iter(free_port_row(12))
        self.hub, http = next(self._ports), next(self._ports)
        self._security = ["--node-secret-file", str(folder / "secret")]
        self.master = self._start(
            "master", http, "cluster", "--hub", f"127.0.0.1:{self.hub}",
            "--api-key-file", str(folder / "keys"),
        )  # fmt: skip
        self.nodes: dict[str, NodeServer] = {}

    def join(self, name: str) -> None:
        data, http, first, last = (next(self._ports) for _ in range(4))
        self.nodes[name] = self._start(
            name, http, "node", "--join", f"127.0.0.1:{self.hub}", "--node-name", name,
            "--data-port", str(data), "--service-ports", f"{first}-{last}", "--threads", "1",
        )  # fmt: skip

    def _start(self, name: str, port: int, *command: str) -> NodeServer:
        log = self._folder / f"{name}.log"
        own = [*command, "--port", str(port), *self._security]
        return NodeServer(LoopbackRig(1), 0, ["gllm", *own], port, log)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of an answer of the master; the code of an error."""
        return request(method, self.master.url + path, KEY, body)

    def wait(self, state: str, name: str) -> Any:
        """Wait for a state of a service; its status."""

        def is_reached() -> bool:
            status = self.call("GET", f"/services/{name}")
            assert state == "failed" or status["state"] != "failed", status["cause"]
            return bool(status["state"] == state)

        # The longest wait: two processes of `gllm serve` load the model.
        wait_until(is_reached, 2 * DEADLINE)
        return self.call("GET", f"/services/{name}")

    def free_nodes(self) -> set[str]:
        rows = self.call("GET", "/nodes")["nodes"]
        return {row["name"] for row in rows if row["service"] is None}

    def close(self) -> None:
        servers = [self.master, *self.nodes.values()]
        pids = [pid for server in servers for pid in server.pids()]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for server in servers:
            server.process.wait()
            print(f"--- {server.log_path}\n{server.log[-6000:]}")


def request(method: str, url: str, key: str, body: Any = None) -> Any:
    """The JSON of an answer; the code of an error."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    question = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(question, timeout=DEADLINE) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return json.load(error)["error"]["code"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterProcesses]:
    """A master with two nodes."""
    processes = ClusterProcesses(tmp_path)
    try:
        for name in ("a", "b"):
            processes.join(name)
        wait_until(lambda: processes.master.status("/health") == 200)
        wait_until(lambda: processes.free_nodes() == {"a", "b"})
        yield processes
    finally:
        processes.close()


BODY = {
    "service_name": "chat",
    "model_name": "demo",
    "resource_specification": {"num_nodes": 2},
    "inference_parameters": PARAMETERS,
}
TEXT = {"prompt": "Once", "max_tokens": 8, "ignore_eos": True}


def test_a_service_starts_serves_and_dies(cluster: ClusterProcesses) -> None:
    """A service of two nodes that is killed fails with its cause; master and nodes go on."""
    status = cluster.call("POST", "/services", BODY)
    assert sorted(status["nodes"]) == ["a", "b"]
    url = cluster.wait("ready", "chat")["url"]
    key = cluster.call("GET", "/services/chat/key")["api_key"]
    assert request("POST", f"{url}/v1/completions", "another", TEXT) == "invalid_api_key"
    answer = request("POST", f"{url}/v1/completions", key, TEXT)
    assert answer["usage"]["completion_tokens"] == 8
    rows = request("GET", f"{url}/nodes", key)["nodes"]
    assert sorted((row["name"], row["stages"]) for row in rows) in (
        [("a", [0]), ("b", [1])], [("a", [1]), ("b", [0])]
    )  # fmt: skip
    wait_until(lambda: cluster.call("GET", "/services/chat")["tokens"]["generated"] == 8)
    assert cluster.call("GET", "/services/chat")["requests"]["finished"] == 1

    os.kill(descendants(cluster.nodes[status["head"]].pid)[1], signal.SIGKILL)
    assert "it was killed by SIGKILL" in cluster.wait("failed", "chat")["cause"]
    wait_until(lambda: cluster.free_nodes() == set(cluster.nodes))
    assert cluster.master.status("/health") == 200

    # All nodes end with the master.
    cluster.master.process.send_signal(signal.SIGTERM)
    assert cluster.master.end()[0] == 0
    for node in cluster.nodes.values():
        assert node.end()[0] == 0


@pytest.mark.full
def test_a_node_leaves_a_service_and_the_service_ends(cluster: ClusterProcesses) -> None:
    status = cluster.call("POST", "/services", BODY)
    url = cluster.wait("ready", "chat")["url"]
    key = cluster.call("GET", "/services/chat/key")["api_key"]

    # A node leaves the running engine; no request fails, and the service goes on without it.
    member = next(name for name in status["nodes"] if name != status["head"])
    drain = [sys.executable, "-m", "gllm", "drain", member, cluster.master.url, "--api-key", KEY]
    result = subprocess.run(drain, capture_output=True, text=True, timeout=DEADLINE)
    assert result.returncode == 0, result.stderr
    assert cluster.nodes.pop(member).end()[0] == 0
    status = cluster.call("GET", "/services/chat")
    assert (status["state"], status["nodes"]) == ("ready", [status["head"]])
    assert request("POST", f"{url}/v1/completions", key, TEXT)["usage"]["completion_tokens"] == 8

    started = [pid for node in cluster.nodes.values() for pid in descendants(node.pid)[1:]]
    assert cluster.call("DELETE", "/services/chat")["state"] == "stopping"
    wait_until(lambda: cluster.call("GET", "/services/chat") == "service_not_found")
    assert cluster.call("DELETE", "/services/chat")["state"] == "absent"
    assert cluster.free_nodes() == set(cluster.nodes)
    wait_until(lambda: not any(map(alive, started)))
