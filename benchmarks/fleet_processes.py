"""Router and engine processes on this machine, for benchmarks."""

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from benchmarks.cpu.watch import cpu_seconds, tree
from gllm.plan.serving_plan import ServingPlan, write_plan

START_SECONDS = 120.0
"""Maximum time until a process is ready."""


class FleetProcess:
    """A process with an HTTP port."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: Path) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of the process and its descendants."""
        return cpu_seconds(tree(self._process.pid))

    @property
    def own_cpu_seconds(self) -> float:
        """CPU seconds of the process alone."""
        return cpu_seconds([self._process.pid])

    async def wait_until(
        self, session: aiohttp.ClientSession, path: str, num_rows: int = 0
    ) -> None:
        """Poll a path until it answers 200, and has so many engines.

        Raises:
            RuntimeError: the process has exited; the message is the end of its log.
            TimeoutError: START_SECONDS are over.
        """
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.returncode is not None:
                raise RuntimeError(self._log.read_text()[-2000:])
            try:
                async with session.get(self.url + path) as response:
                    if response.status == 200 and (
                        not num_rows or len((await response.json())["engines"]) >= num_rows
                    ):
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
        raise TimeoutError(f"{self.url}{path}: {self._log.read_text()[-2000:]}")

    async def stop(self) -> None:
        """End the process and its descendants."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), 20)
            except TimeoutError:
                os.killpg(self._process.pid, signal.SIGKILL)
                await self._process.wait()


@asynccontextmanager
async def started(module: str, port: int, arguments: Sequence[str]) -> AsyncIterator[FleetProcess]:
    """Start `python -m MODULE demo --port PORT ...`; stop it at the end."""
    command = [sys.executable, "-m", module, "demo", "--port", str(port), "--log-level", "warning"]
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = await asyncio.create_subprocess_exec(
            *command, *arguments, stdout=log, stderr=log, start_new_session=True
        )
        running = FleetProcess(process, port, Path(log.name))
        try:
            yield running
        finally:
            await running.stop()


def open_session() -> aiohttp.ClientSession:
    """Return a session for any number of requests at once."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        headers={"Content-Type": "application/json"},
    )


@asynccontextmanager
async def serving(plan: ServingPlan, step_logs: Path | None = None) -> AsyncIterator[str]:
    """Run `gllm up` on a plan; yield the router's URL once it answers.

    Args:
        plan: With a router.
        step_logs: Folder for the step logs of the engines.
    """
    assert plan.router is not None
    url = f"http://127.0.0.1:{plan.router.port}"
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "plan.yaml", Path(folder) / "log"
        write_plan(plan, path)
        command = [sys.executable, "-m", "gllm", "up", str(path)]
        if step_logs is not None:
            command += ["--step-logs", str(step_logs)]
        with log.open("w") as output:
            process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
        try:
            async with asyncio.timeout(START_SECONDS), open_session() as session:
                while not await responds(session, f"{url}/version"):
                    if process.returncode is not None:
                        raise RuntimeError(log.read_text()[-2000:])
                    await asyncio.sleep(0.1)
            yield url
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                await asyncio.wait_for(process.wait(), 60)


@asynccontextmanager
async def ready_service(plan: ServingPlan, step_logs: Path | None = None) -> AsyncIterator[str]:
    """Run `gllm up` on a plan until all engines serve; yield the router's URL."""
    async with serving(plan, step_logs) as url, open_session() as session:
        async with asyncio.timeout(START_SECONDS):
            while not await responds(session, f"{url}/ready"):
                await asyncio.sleep(0.1)
            num_ready = 0
            while num_ready < len(plan.engines):
                async with session.get(f"{url}/engines") as answer:
                    rows = (await answer.json())["engines"]
                num_ready = sum(row["state"] == "ready" for row in rows)
                await asyncio.sleep(0.1)
        yield url


async def responds(session: aiohttp.ClientSession, url: str) -> bool:
    """Return True if a GET is answered with 200."""
    try:
        async with session.get(url) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False
