"""A router and two engines on two machines of a rig: one prefills, the other one decodes."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.net.rig import NamespaceRig
from gllm.runtime.messaging.security import create_secret_file
from tests.support.servers.nodes import EXACT, NodeServer
from tests.support.servers.recovery_load import COMPLETIONS
from tests.support.servers.server import wait_until

HTTP_PORTS = {"router": 8000, "P": 8001, "D": 8001}


class Machines:
    """A router and the prefill engine P on one machine, the decode engine D on another one."""

    def __init__(self, rig: NamespaceRig, servers: dict[str, NodeServer]) -> None:
        self.rig = rig
        self.servers = servers

    def rows(self) -> dict[str, dict[str, Any]]:
        """Rows of /engines by name."""
        try:
            rows = self.servers["router"].get("/engines")["engines"]
        except (OSError, json.JSONDecodeError):
            return {}
        return {row["name"]: row for row in rows}

    def stats(self, name: str) -> dict[str, Any]:
        """Statistics of an engine, as the router knows them."""
        stats: dict[str, Any] = self.rows()[name]["stats"]
        return stats

    def wait_until_ready(self) -> None:
        """Wait until both engines take hand-offs."""

        def are_ready() -> bool:
            rows = self.rows()
            return rows.keys() == {"P", "D"} and all(
                row["has_kv_transfer"] and row["state"] == "ready" for row in rows.values()
            )

        wait_until(are_ready)

    def wait_until_empty(self) -> None:
        """Wait until no engine has blocks in use, or for another one."""

        def is_empty() -> bool:
            names = "running", "waiting", "fetching", "held_blocks", "kv_usage"
            return not any(self.stats(each)[name] for each in ("P", "D") for name in names)

        wait_until(is_empty)

    def complete(self, name: str, body: dict[str, Any]) -> Any:
        """Return the choices of a completion by the router or an engine."""
        status, answer = self.servers[name].post(COMPLETIONS, body)
        assert status == 200, answer
        return answer["choices"]


@contextmanager
def running_machines(
    folder: Path, preset: str, *flags: str, shaped: tuple[int, ...] = ()
) -> Iterator[Machines]:
    """Start the machines; logs and the secret are written to the folder."""
    secret = folder / "secret"
    create_secret_file(secret)
    with NamespaceRig(2, shaped=shaped) as rig, ExitStack() as stack:
        servers: dict[str, NodeServer] = {}

        def start(name: str, machine: int, *command: str) -> None:
            port = HTTP_PORTS[name]
            common = ["--port", str(port), "--node-secret-file", str(secret), "--preset", preset]
            log = folder / f"{name}.log"
            server = servers[name] = NodeServer(rig, machine, [*command, *common], port, log)
            stack.callback(server.process.wait)
            stack.callback(server.process.kill)

        hub, data = rig.reach(0, 29700), rig.reach(0, 29710)
        start("router", 0, "gllm.commands.router", "demo", "--hub", hub)
        common = ["demo", *EXACT, "--router", hub, "--kv-transfer", "--kv-fetch", "always", *flags]
        prefill = ["--role", "prefill", "--name", "P", "--kv-transfer-address", data]
        start("P", 0, "gllm.serve", *common, *prefill)
        start("D", 1, "gllm.serve", *common, "--role", "decode", "--name", "D")
        machines = Machines(rig, servers)
        machines.wait_until_ready()
        yield machines
