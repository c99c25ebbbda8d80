"""Owner of a node's processes: starts them, waits until they serve, drains and ends them."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import aiohttp

from gllm.config.node_environment import remove_launcher
from gllm.deploy.up.child_process import LoggedProcess
from gllm.plan.processes import ProcessSpec

PROBE_SECONDS = 0.2
"""Interval of the probes of a process until it is ready."""
PROBE_TIMEOUT_SECONDS = 5.0
log = logging.getLogger("gllm")


@dataclass
class _ManagedProcess:
    """A process from the command to start it until it was reaped."""

    spec: ProcessSpec
    child: LoggedProcess
    task: asyncio.Task[None]
    may_fail: bool = False
    """Its failure ends no other process."""
    cause: str = ""
    """Cause of its end in words; empty while it runs."""


class ProcessSupervisor:
    """Processes of a plan on this node.

    One failure ends all of them: a plan with fewer engines than it says does not meet its goals,
    and who started it knows better whether to start it again.
    """

    def __init__(
        self,
        specs: Iterable[ProcessSpec],
        on_line: Callable[[str, str], None],
        on_ready: Callable[[list[ProcessSpec]], None],
        make_command: Callable[[ProcessSpec], Sequence[str]] | None = None,
        is_scaled: bool = False,
        probe_seconds: float = PROBE_SECONDS,
    ) -> None:
        """Create a node without processes.

        Args:
            specs: processes that may run here.
            on_line: receives the name of a process and a line that it writes.
            on_ready: receives all processes once each one of them is ready.
            make_command: returns program and arguments of a process; None for this Python.
            is_scaled: begin with the router alone. Engines are started and ended by the caller, and
                the failure of one ends no other process.
            probe_seconds: interval of the probes of a process until it is ready.
        """
        self.cause = ""
        """First failure; empty without one."""
        self._specs = {spec.name: spec for spec in specs}
        self._on_line = on_line
        self._on_ready = on_ready
        self._make_command = make_command or python_command
        self._is_scaled = is_scaled
        self._probe_seconds = probe_seconds
        self._processes: dict[str, _ManagedProcess] = {}
        self._should_stop = asyncio.Event()

    @property
    def running(self) -> list[str]:
        """Names of the processes that run and shall not end."""
        return [name for name, each in self._processes.items() if each.child.end_signal is None]

    @property
    def is_stopping(self) -> bool:
        """True once all processes end."""
        return self._should_stop.is_set()

    async def run(self) -> int:
        """Run all processes until a signal, a failure or the end of all.

        Returns:
            The exit status: 1 after a failure, whose text is in `cause`.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        readiness = asyncio.create_task(self._announce())
        try:
            for name, spec in self._specs.items():
                if spec.is_router or not self._is_scaled:
                    self._start(name)
            await self._should_stop.wait()
        finally:
            readiness.cancel()
            await asyncio.gather(readiness, return_exceptions=True)
            await self._shut_down()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        return 1 if self.cause else 0

    def stop(self) -> None:
        """End all processes: first the router, which finishes its requests, then the engines."""
        self._should_stop.set()

    def set_specs(self, specs: Iterable[ProcessSpec]) -> None:
        """Set the processes that may be started from now on; those that run go on."""
        self._specs = {spec.name: spec for spec in specs}

    async def start_engine(
        self, name: str, timeout_seconds: float | None = None, may_fail: bool = False
    ) -> None:
        """Start an engine that does not run, and wait until it is ready.

        Args:
            name: of the engine.
            timeout_seconds: time after which an engine that is not ready is ended; None for none.
            may_fail: its failure before it is ready ends no other process.

        Raises:
            ValueError: there is no such engine, it runs already, it has ended, it was not ready in
                time, or all processes end.
        """
        spec = self._specs.get(name)
        if spec is None or spec.is_router:
            raise ValueError(f"there is no engine {name!r} on this node")
        if name in self._processes:
            raise ValueError(f"the engine {name!r} runs already")
        if self.is_stopping:
            raise ValueError(f"the engine {name!r} is not started, because all processes end")
        process = self._start(name)
        process.may_fail = may_fail
        ready = asyncio.create_task(self._wait_until_ready([process]))
        try:
            await asyncio.wait(
                {ready, process.task},
                timeout=timeout_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if ready.done():
                return
            if process.task.done():
                raise ValueError(
                    f"the engine {name!r} has ended before it was ready: {process.cause}"
                )
            process.child.end(process.spec.shutdown_seconds)
            await asyncio.shield(process.task)
            raise ValueError(f"the engine {name!r} was not ready after {timeout_seconds} s")
        finally:
            ready.cancel()
            process.may_fail = False

    async def drain_engine(self, name: str, may_fail: bool = False) -> None:
        """Let an engine finish or pass on its requests, and wait for its end.

        Args:
            name: of the engine.
            may_fail: an end with an error, such as by SIGKILL, ends no other process.

        Raises:
            ValueError: no such engine runs.
        """
        process = self._processes.get(name)
        if process is None or process.spec.is_router:
            raise ValueError(f"no engine {name!r} runs on this node")
        process.may_fail = may_fail
        process.child.end(process.spec.shutdown_seconds)
        await asyncio.shield(process.task)

    def fail(self, cause: str) -> None:
        """End all processes because of a failure; the first cause is kept."""
        if not self.cause:
            self.cause = cause
            log.error("%s", cause)
        self.stop()

    def _on_signal(self, number: int) -> None:
        if self._should_stop.is_set():
            log.warning("second signal: all processes are killed")
            for process in self._processes.values():
                process.child.send(signal.SIGKILL)
            return
        log.info("%s: the router is drained, then the engines", signal.Signals(number).name)
        self.stop()

    def _start(self, name: str) -> _ManagedProcess:
        spec = self._specs[name]
        child = LoggedProcess(partial(self._on_line, name))
        task = asyncio.create_task(self._watch(spec, child))
        self._processes[name] = process = _ManagedProcess(spec, child, task)
        return process

    async def _watch(self, spec: ProcessSpec, child: LoggedProcess) -> None:
        """Run a process until it exits; an exit that nobody asked for ends the others."""
        environment = remove_launcher(os.environ) | spec.environment
        try:
            child.start(self._make_command(spec), environment, has_own_group=True)
            cause = await child.wait()
        except OSError as error:
            cause = f"it could not be started: {error}"
        process = self._processes.pop(spec.name)
        process.cause = f"{spec.title}: {cause}"
        if child.status not in (0, None) or not child.is_started:
            self._on_failure(process)
        elif child.end_signal is None:
            log.info("%s has ended", spec.title)
        if spec.is_router or not (self._processes or self._is_scaled):
            self.stop()

    def _on_failure(self, process: _ManagedProcess) -> None:
        if process.may_fail or (self._is_scaled and not process.spec.is_router):
            log.warning("%s", process.cause)
            return
        self.fail(process.cause)

    async def _announce(self) -> None:
        processes = list(self._processes.values())
        await self._wait_until_ready(processes)
        self._on_ready([process.spec for process in processes])

    async def _wait_until_ready(self, processes: Sequence[_ManagedProcess]) -> None:
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for process in processes:
                while not await _is_ready(session, process.spec.url):
                    await asyncio.sleep(self._probe_seconds)

    async def _shut_down(self) -> None:
        """End the router, then the engines; each may finish its requests."""
        for is_router in (True, False):
            ending = [each for each in self._processes.values() if each.spec.is_router is is_router]
            for process in ending:
                process.child.end(process.spec.shutdown_seconds)
            await asyncio.gather(*(each.task for each in ending), return_exceptions=True)


def python_command(spec: ProcessSpec) -> list[str]:
    """Return program and arguments of a process."""
    return [sys.executable, "-m", spec.module, *spec.arguments]


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        # The certificate of an own process is not a matter of trust.
        async with session.get(f"{url}/ready", ssl=False) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
