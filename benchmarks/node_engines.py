"""Engines of two stages on this machine, as one node or as two, for benchmarks."""

import asyncio
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from benchmarks.cpu.serving import free_port
from benchmarks.cpu.watch import PROC, cpu_seconds, tree
from benchmarks.fleet_processes import FleetProcess
from gllm.runtime.messaging.security import create_secret_file

ROLES = ("head", "agent", "gllm-link", "stages")
"""Kinds of processes whose CPU time is reported."""


class NodeEngine:
    """A running engine and the CPU time of its processes."""

    def __init__(self, name: str, processes: Sequence[FleetProcess]) -> None:
        self.name = name
        self.url = processes[0].url
        self._processes = processes

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU seconds so far of each of ROLES."""
        seconds: dict[str, float] = defaultdict(float)
        for number, process in enumerate(self._processes):
            for pid in tree(process.pid):
                role = _role(pid) or ("agent" if number else "head")
                seconds[role] += cpu_seconds([pid])
        return seconds


def _role(pid: int) -> str:
    """Return the role that a process's title names; empty for head and agent."""
    try:
        title = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[0].decode()
    except FileNotFoundError:
        return ""
    if title.startswith("gllm-stage"):
        return "stages"
    return "gllm-link" if title.startswith("gllm-link") else ""


@asynccontextmanager
async def running_engine(
    name: str,
    model: str,
    flags: Sequence[str],
    session: aiohttp.ClientSession,
    num_nodes: int = 1,
    secret: Path | None = None,
) -> AsyncIterator[NodeEngine]:
    """Start an engine of one or two nodes on loopback addresses; stop it at the end.

    Args:
        name: of the engine in the figures.
        model: a folder, or demo.
        flags: of `gllm serve`.
        session: for the probes.
        num_nodes: 1 or 2.
        secret: file of the node secret; None without encryption.
    """
    master = f"127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:
        processes = []
        for rank in range(num_nodes):
            own = list(flags)
            if num_nodes > 1:
                own += ["--nnodes", str(num_nodes), "--node-rank", str(rank)]
                own += ["--master-addr", master, "--node-name", f"node-{rank}"]
                own += ["--data-port", str(free_port())]
                own += ["--node-secret-file", str(secret)] if secret else []
            processes.append(await stack.enter_async_context(_started(model, own)))
        for process in processes:
            await process.wait_until(session, "/ready")
        yield NodeEngine(name, processes)


@asynccontextmanager
async def _started(model: str, flags: Sequence[str]) -> AsyncIterator[FleetProcess]:
    port = free_port()
    command = [sys.executable, "-m", "gllm.serve", model, "--port", str(port)]
    command += ["--log-level", "warning", *flags]
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=log, stderr=log, start_new_session=True
        )
        running = FleetProcess(process, port, Path(log.name))
        try:
            yield running
        finally:
            await running.stop()


def make_secret(folder: Path) -> Path:
    """Create a file with a node secret; return its path."""
    path = folder / "secret"
    create_secret_file(path)
    return path
