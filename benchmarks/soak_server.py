"""The server of a soak test, and the agents of its other nodes: started, killed in part, ended."""

import asyncio
import os
import random
import shlex
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import msgspec

from benchmarks.cpu.serving import free_port
from benchmarks.soak_samples import ProcessSampler
from gllm.deploy.metrics_scrape import MetricsScrape, parse_metrics

START_SECONDS = 300.0
"""Maximum time until the server is ready."""
END_SECONDS = 60.0
"""Maximum time until a process has ended after SIGTERM."""
IDLE_SECONDS = 120.0
"""Maximum time until a server without requests is ready and has freed everything."""
HEAD = "head"
"""Name of the node of the server itself."""


class SoakServer:
    """A server, the agents of its other nodes, and their processes."""

    def __init__(
        self, processes: dict[str, asyncio.subprocess.Process], url: str, log: Path, temporary: Path
    ) -> None:
        self.url = url
        self.sampler = ProcessSampler({node: each.pid for node, each in processes.items()})
        self._processes = processes
        self._log = log
        self._temporary = temporary
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30))

    async def scrape(self) -> MetricsScrape | None:
        """Return the metrics; None if the server does not answer in time."""
        try:
            async with self._session.get(f"{self.url}/metrics") as response:
                return parse_metrics(await response.text(), self.sampler.seconds)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None

    async def num_requests(self) -> int | None:
        """Return the number of requests in the engine; None if the server does not answer."""
        try:
            async with self._session.get(f"{self.url}/load") as response:
                return int((await response.json())["server_load"])
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def wait_until_ready(self, seconds: float = START_SECONDS) -> None:
        """Poll /ready.

        Raises:
            TimeoutError: The time is over.
            RuntimeError: A process has exited; the message is the end of its log.
        """
        async with asyncio.timeout(seconds):
            while True:
                for node, process in self._processes.items():
                    if process.returncode is not None:
                        raise RuntimeError(f"{node} ended: {self.log_end()}")
                with suppress(aiohttp.ClientError):
                    async with self._session.get(f"{self.url}/ready") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.1)

    async def wait_until_idle(self) -> list[str]:
        """Wait until nothing runs; return what is still in use when the time is over."""
        await self.wait_until_ready(IDLE_SECONDS)
        remains = ["no metrics"]
        for _ in range(int(IDLE_SECONDS)):
            scrape, num_requests = await self.scrape(), await self.num_requests()
            if scrape is not None:
                figures = {
                    "requests": num_requests,
                    "running sequences": scrape.value("num_requests_running"),
                    "waiting sequences": scrape.value("num_requests_waiting"),
                    "share of KV blocks": scrape.value("kv_cache_usage_perc"),
                    "micro-batches": scrape.value("micro_batches_in_flight"),
                }
                remains = [f"{name}: {value}" for name, value in figures.items() if value != 0]
                if not remains:
                    break
            await asyncio.sleep(1)
        return remains

    def kill(self, chooser: random.Random, prefixes: Sequence[str]) -> str | None:
        """Kill a random process whose title begins with one of the prefixes; return its role."""
        victims = self.sampler.processes(prefixes)
        if not victims:
            return None
        pid = chooser.choice(sorted(victims))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return victims[pid]

    async def stop(self) -> list[str]:
        """End all processes; return what they leave behind and how they failed to end."""
        await self._session.close()
        problems = []
        for process in reversed(self._processes.values()):
            if process.returncode is None:
                process.terminate()
        for node, process in self._processes.items():
            try:
                status = await asyncio.wait_for(process.wait(), END_SECONDS)
            except TimeoutError:
                problems.append(f"{node} did not end after SIGTERM")
            else:
                if status:
                    problems.append(f"{node} ended with status {status}: {self.log_end()}")
        problems += [f"process {pid} still runs" for pid in self.sampler.pids if _is_alive(pid)]
        problems += [f"left behind: {path.name}" for path in self._temporary.iterdir()]
        return problems

    def log_end(self) -> str:
        """Return the end of the processes' log."""
        return self._log.read_text(errors="replace")[-2000:]

    async def kill_all(self) -> None:
        """Kill the processes that still run."""
        await self._session.close()
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _is_alive(pid: int) -> bool:
    """Return True if a process runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@asynccontextmanager
async def serving(
    model: str, flags: Sequence[str], agents: Sequence[str], log: Path
) -> AsyncIterator[SoakServer]:
    """Start a server and its agents, yield it once it is ready, kill what is left at the end.

    Args:
        model: A folder, a hub name or `demo`.
        flags: Of the server.
        agents: Commands of other nodes; a first word `python` is this interpreter.
        log: File for stdout and stderr of all processes.
    """
    port = free_port()
    server = [sys.executable, "-m", "gllm.serve", model, "--port", str(port), *flags]
    commands = {HEAD: server}
    for number, line in enumerate(agents, start=1):
        program, *words = shlex.split(line)
        commands[f"node-{number}"] = [sys.executable if program == "python" else program, *words]
    with tempfile.TemporaryDirectory() as folder, log.open("wb") as out:
        temporary = Path(folder)
        processes = {}
        for node, command in commands.items():
            processes[node] = await asyncio.create_subprocess_exec(
                *command,
                stdout=out,
                stderr=out,
                env={**os.environ, "TMPDIR": folder},
                start_new_session=True,
            )
        running = SoakServer(processes, f"http://127.0.0.1:{port}", log, temporary)
        try:
            await running.wait_until_ready()
            yield running
        finally:
            await running.kill_all()


def describe_command(model: str, flags: Sequence[str], agents: Sequence[str]) -> str:
    """Return the commands of all nodes in one line."""
    head = shlex.join(["python", "-m", "gllm.serve", model, *flags])
    return "; ".join(f"`{line}`" for line in (head, *agents))


def to_json(rows: Sequence[msgspec.Struct]) -> list[dict[str, object]]:
    """Return structs as dictionaries."""
    return [msgspec.to_builtins(row) for row in rows]
