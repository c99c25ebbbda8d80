"""Ray clusters of several raylets on loopback addresses of this machine.

Raylets start in a second even on a busy machine: the processes that serve Ray's dashboard are left
out. Ray waits 15 seconds for the ports of the dashboard's agent, whatever its settings, so a
process that does nothing has its place.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.network.ports import free_ports
from tests.support.servers.server import children

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Nothing may be waited for too short a time on a busy machine.
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_worker_register_timeout_seconds": "120",
    # Workers start when an actor needs one.
    "RAY_enable_worker_prestart": "0",
    "RAY_num_prestart_python_workers": "0",
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "0",
    "RAY_DEDUP_LOGS": "0",
}
OBJECT_STORE_BYTES = 80 * 2**20
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")


class Raylets:
    """A Ray cluster; the first raylet, at 127.0.0.11, has the control store.

    Args:
        num_raylets: raylets to start with.
    """

    def __init__(self, num_raylets: int) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self.raylets: list[Any] = []
        self.addresses: list[str] = []
        for _ in range(num_raylets):
            self.add()

    @property
    def address(self) -> str:
        """Address of the cluster, for --ray-address."""
        return str(self._cluster.address)

    def add(self, num_cpus: int = 2) -> str:
        """Start a raylet and return its address."""
        address = f"127.0.0.{11 + len(self.raylets)}"
        arguments: dict[str, Any] = {
            "num_cpus": num_cpus,
            "object_store_memory": OBJECT_STORE_BYTES,
            "node_ip_address": address,
            **free_ports(*AGENT_PORTS, "runtime_env_agent_port"),
        }
        if not self.raylets:
            arguments |= {"include_dashboard": False, "no_monitor": True}
        self.addresses.append(address)
        self.raylets.append(self._cluster.add_node(include_log_monitor=False, **arguments))
        return address

    def agents(self) -> list[int]:
        """Return the process ids of the agents of all raylets."""
        found = []
        for raylet in self.raylets:
            for processes in raylet.all_processes.values():
                for each in processes:
                    found += find_processes(each.process.pid, "gllm-node")
        return found

    def kill(self, index: int) -> None:
        """Kill a raylet with all its processes, as a power failure would."""
        self._cluster.remove_node(self.raylets[index], allow_graceful=False)

    def close(self) -> None:
        """End all raylets and the control store."""
        self._cluster.shutdown()


@contextmanager
def start_raylets(num_raylets: int) -> Iterator[Raylets]:
    """Run a Ray cluster in a folder of its own, which is removed at the end."""
    from ray._private import node, services

    # Ray's sockets have paths of up to 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    (folder / "ray").mkdir()
    start = services.start_ray_process

    def start_without_dashboard(command: list[str], process_type: str, **options: Any) -> Any:
        if process_type == "raylet":
            command = [_without_dashboard(text) for text in command]
            _write_agent_ports(command)
        return start(command, process_type, **options)

    with (
        mock.patch.dict(os.environ, ENVIRONMENT | {"RAY_TMPDIR": str(folder)}),
        mock.patch.object(services, "start_ray_process", start_without_dashboard),
        mock.patch.object(node.Node, "start_api_server"),
    ):
        os.environ.pop("RAY_ADDRESS", None)
        raylets = Raylets(num_raylets)
        try:
            yield raylets
        finally:
            raylets.close()
            shutil.rmtree(folder, ignore_errors=True)


def find_processes(ancestor: int, title: str) -> list[int]:
    """Return the processes with a title that an ancestor has started, also indirectly."""
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for pid in children(ancestor):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
            if command == title:
                found.append(pid)
            found += find_processes(pid, title)
    return found


def _without_dashboard(text: str) -> str:
    flag, equals, _ = text.partition("=")
    is_agent = flag == "--dashboard_agent_command"
    return f"{flag}{equals}sleep infinity" if is_agent else text


def _write_agent_ports(command: list[str]) -> None:
    """Write the files with ports that a raylet waits for."""
    flags = dict(
        text[2:].split("=", 1) for text in command if text.startswith("--") and "=" in text
    )
    for name, port in free_ports(*AGENT_PORTS).items():
        number = flags.get(name.replace("metrics_agent_port", "metrics-agent-port"), str(port))
        (Path(flags["session_dir"]) / f"{name}_{flags['node_id']}").write_text(number)
