"""An engine on several machines, each with processes of its own, as a user starts it."""

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.net.rig import LoopbackRig, NamespaceRig, Rig
from gllm.runtime.messaging.security import create_secret_file
from tests.support.network.ports import free_port
from tests.support.servers.server import DEADLINE, Server, alive, children, places, wait_until

HTTP_PORT, HEAD_PORT, DATA_PORT = 8000, 29600, 29601
"""Ports in namespaces, where nobody else uses them."""
EXACT = ["--dtype", "float32", "--threads", "1", "--kv-cache-memory", "64MiB"]
"""Flags with which texts do not depend on the number of stages, nor on recoveries."""
NODE_TIMEOUT = "5"
"""Seconds of silence after which a machine is lost: more than a busy one may need."""


def descendants(pid: int) -> list[int]:
    """A process and all that it and its descendants have started."""
    pids = [pid]
    for each in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            pids += children(each)
    return pids


class NodeServer(Server):
    """`python -m gllm.serve MODEL FLAGS` on one machine."""

    def __init__(
        self, rig: Rig, machine: int, command: Sequence[str], port: int, log: Path
    ) -> None:
        self.machine = machine
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = log
        self._rig = rig
        self._tls = None
        with log.open("ab") as file:
            self.process = rig.popen(
                machine, [sys.executable, "-m", *command], stderr=file, stdout=file
            )

    def open(self, path: str, data: bytes | None, **headers: str) -> Any:
        """The answer to a request that is sent on the machine itself. Raises HTTPError."""
        with self._rig.inside(self.machine):
            return super().open(path, data, **headers)

    def get(self, path: str) -> Any:
        """The JSON of a GET."""
        with self.open(path, None) as answer:
            return json.load(answer)

    @property
    def log(self) -> str:
        """All that the process has written."""
        return self.log_path.read_text()

    def pids(self) -> list[int]:
        """The process and its descendants that live."""
        return [pid for pid in descendants(self.pid) if alive(pid)]

    def stage_pids(self) -> dict[str, int]:
        """Process ids of the workers by stage, or by stage.rank."""
        return places(self.pid)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to all processes of the machine at once."""
        pids = self.pids()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGKILL:
            self.process.wait()
            wait_until(lambda: not any(map(alive, pids)))

    def end(self) -> tuple[int, str]:
        """Wait for the process to end; its status and its log."""
        return self.process.wait(timeout=DEADLINE), self.log


class Cluster:
    """An engine of several machines; machine 0 is the head's."""

    def __init__(
        self, rig: Rig, folder: Path, num_nodes: int, *flags: str, has_secret: bool = True
    ) -> None:
        self.rig = rig
        self.num_nodes = num_nodes
        self.flags = flags
        self.folder = folder
        self.servers: dict[int, NodeServer] = {}
        self.all_servers: list[NodeServer] = []
        """Those that have ended included."""
        is_isolated = isinstance(rig, NamespaceRig)
        self.head_port = HEAD_PORT if is_isolated else free_port()
        self.security: list[str] = []
        if has_secret:
            self.security = ["--node-secret-file", str(self.make_secret("secret"))]

    @property
    def head(self) -> NodeServer:
        """Server of the head."""
        return self.servers[0]

    def make_secret(self, name: str) -> Path:
        """Path of a file with a new secret."""
        path = self.folder / name
        if not path.exists():
            create_secret_file(path)
        return path

    def start(
        self, rank: int, *flags: str, model: str = "demo", security: Sequence[str] | None = None
    ) -> NodeServer:
        """Start the node of a rank on the machine of this number."""
        master = f"{self.rig.addresses[0]}:{self.head_port}"
        if rank and isinstance(self.rig, LoopbackRig):
            master = self.rig.reach(0, self.head_port, source=rank)
        place = ["--nnodes", str(self.num_nodes), "--node-rank", str(rank)]
        place += ["--master-addr", master, "--node-timeout", NODE_TIMEOUT]
        return self._run(
            rank, ["gllm.serve", model, *EXACT, *place], security, [*self.flags, *flags]
        )

    def join(self, machine: int, *flags: str, model: str = "demo") -> NodeServer:
        """Start `gllm node --join` on a machine: a node without a rank."""
        master = f"{self.rig.addresses[0]}:{self.head_port}"
        command = ["gllm", "node", "--join", master, "--model", model]
        return self._run(machine, command, None, flags)

    def run(self, machine: int, command: Sequence[str]) -> NodeServer:
        """Start any server on a machine, such as a router; it gets a port."""
        port = self._http_port()
        log = self.folder / f"other-{machine}.log"
        server = NodeServer(self.rig, machine, [*command, "--port", str(port)], port, log)
        self.all_servers.append(server)
        return server

    def _run(
        self,
        machine: int,
        command: Sequence[str],
        security: Sequence[str] | None,
        flags: Sequence[str],
    ) -> NodeServer:
        is_isolated = isinstance(self.rig, NamespaceRig)
        port = self._http_port()
        data_port = DATA_PORT if is_isolated else free_port()
        own = ["--port", str(port), "--node-name", f"machine-{machine}"]
        if "--data-port" not in flags:
            own += ["--data-port", str(data_port)]
        own += self.security if security is None else security
        log = self.folder / f"machine-{machine}.log"
        server = NodeServer(self.rig, machine, [*command, *own, *flags], port, log)
        self.servers[machine] = server
        self.all_servers.append(server)
        return server

    def wait_until_ready(self) -> None:
        """Wait until the engine is ready. Fails if a process ends."""

        def is_ready() -> bool:
            for server in self.servers.values():
                assert server.process.poll() is None, server.log[-3000:]
            return self.head.status("/ready") == 200

        wait_until(is_ready)

    def nodes(self) -> dict[str, dict[str, Any]]:
        """The rows of GET /nodes by name."""
        return {row["name"]: row for row in self.head.get("/nodes")["nodes"]}

    def pids(self) -> dict[str, int]:
        """Process ids of all workers by stage."""
        return {
            stage: pid for each in self.servers.values() for stage, pid in each.stage_pids().items()
        }

    def close(self) -> None:
        """Kill all processes that still run."""
        pids = [pid for server in self.all_servers for pid in server.pids()]
        for number in (signal.SIGCONT, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        for server in self.all_servers:
            server.process.wait()

    def _http_port(self) -> int:
        return HTTP_PORT if isinstance(self.rig, NamespaceRig) else free_port()


@contextmanager
def running_cluster(
    rig: Rig, folder: Path, num_nodes: int, *flags: str, has_secret: bool = True
) -> Iterator[Cluster]:
    """A cluster whose machines have joined and whose engine is ready."""
    cluster = Cluster(rig, folder, num_nodes, *flags, has_secret=has_secret)
    try:
        for rank in range(num_nodes):
            cluster.start(rank)
        cluster.wait_until_ready()
        yield cluster
    except BaseException:
        for server in cluster.all_servers:
            print(f"--- {server.log_path}\n{server.log[-6000:]}")
        raise
    finally:
        cluster.close()
