"""Processes of services on a node: their start, their log, the readings of a head, their end."""

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from gllm.deploy.cluster.service_command import (
    ServiceMachine,
    ServicePorts,
    make_command,
    make_environment,
    make_url,
)
from gllm.deploy.cluster.service_probe import drain_node, read_engine
from gllm.deploy.logged_process import KILL_SECONDS, LoggedProcess
from gllm.deploy.ports import probe_port
from gllm.deploy.server_client import ServerClient
from gllm.messages.base import WireMessage
from gllm.messages.services import (
    ServiceNodeKept,
    ServiceProcessExited,
    ServiceProcessStarted,
    ServiceReport,
    StartServiceProcess,
)
from gllm.options.addresses import format_host_port

log = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
"""Interval of the readings of an engine."""
PROBE_TIMEOUT_SECONDS = 5.0
MakeCommand = Callable[[ServiceMachine, StartServiceProcess, ServicePorts, str], list[str]]
"""Returns program and arguments of a process; see `service_command.make_command`."""


@dataclass
class _RunningProcess:
    """A process of a service, from the command to start it until it was reaped."""

    start: StartServiceProcess
    child: LoggedProcess
    ports: ServicePorts = field(default_factory=ServicePorts)
    head: str = ""


class ServiceProcesses:
    """All processes of services on this node."""

    def __init__(
        self,
        machine: ServiceMachine,
        send: Callable[[WireMessage], None],
        make_command: MakeCommand = make_command,
        kill_seconds: float = KILL_SECONDS,
    ) -> None:
        """Create a node without processes.

        Args:
            machine: properties that the processes share.
            send: queues a message to the master; it is dropped without a session.
            make_command: returns program and arguments of a process.
            kill_seconds: time beyond that for running requests after which a process is killed.
        """
        self._machine = machine
        self._send = send
        self._make_command = make_command
        self._kill_seconds = kill_seconds
        self._processes: dict[int, _RunningProcess] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._drains: set[asyncio.Task[None]] = set()

    @property
    def living(self) -> list[int]:
        """Numbers of the processes that have not exited and are not about to."""
        return [number for number, each in self._processes.items() if each.child.end_signal is None]

    def start(self, command: StartServiceProcess) -> None:
        """Start a process; its start and its end are reported."""
        child = LoggedProcess(
            lambda line: log.info("%s: %s", command.service, line), self._kill_seconds
        )
        running = _RunningProcess(command, child)
        self._processes[command.process] = running
        self._tasks[command.process] = asyncio.create_task(self._run(running))

    def end(self, number: int) -> None:
        """Let a process finish its running requests and exit; it is killed if it does not."""
        running = self._processes.get(number)
        if running is None:
            # It has exited, which the master may not know.
            self._send(ServiceProcessExited(number, "it does not run"))
            return
        running.child.end(running.start.shutdown_seconds)

    def drain_node(self, number: int, node: str) -> None:
        """Let a node leave the engine of a head; a refusal is reported."""
        running = self._processes.get(number)
        if running is None or not running.child.is_started:
            self._send(ServiceNodeKept(number, node, "its head does not run"))
            return
        task = asyncio.create_task(self._drain_node(running, node))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    def keep(self, wanted: list[int]) -> None:
        """Kill all processes but some, and report those that are heads anew."""
        for number, running in self._processes.items():
            if number not in wanted:
                running.child.send(signal.SIGKILL)
            elif running.child.is_started:
                self._report_start(running)

    async def close(self) -> None:
        """Kill all processes and wait for their end."""
        self.keep([])
        for task in self._drains:
            task.cancel()
        tasks = [*self._tasks.values(), *self._drains]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, running: _RunningProcess) -> None:
        """Run a process until it exits."""
        number = running.start.process
        try:
            cause = await self._run_process(running)
        except (OSError, ValueError) as error:
            cause = f"it could not be started: {error}"
        except Exception as error:
            log.exception("process %d of service %s failed", number, running.start.service)
            cause = f"it could not be watched: {error}"
            running.child.send(signal.SIGKILL)
        del self._processes[number], self._tasks[number]
        level = logging.WARNING if running.child.end_signal is None else logging.INFO
        log.log(level, "a process of service %s has ended: %s", running.start.service, cause)
        self._send(ServiceProcessExited(number, cause))

    async def _run_process(self, running: _RunningProcess) -> str:
        """Start a process and wait for its end; return the cause of the end.

        Raises:
            OSError: it cannot be started, or there is no free port.
            ValueError: the master's command has an invalid parameter.
        """
        start, machine = running.start, self._machine
        is_head = start.node_rank == 0
        if is_head:
            running.ports = self._choose_ports(len(start.degrees) > 1)
        running.head = start.head or format_host_port(machine.address, running.ports.head or 1)
        command = self._make_command(machine, start, running.ports, running.head)
        running.child.start(command, make_environment(start.api_key))
        log.info("a process of service %s starts (pid %d)", start.service, running.child.pid)
        self._report_start(running)
        probing = asyncio.create_task(self._probe(running)) if is_head else None
        try:
            return await running.child.wait()
        finally:
            if probing is not None:
                probing.cancel()
                await asyncio.gather(probing, return_exceptions=True)

    def _report_start(self, running: _RunningProcess) -> None:
        if running.start.node_rank == 0:
            url = make_url(self._machine, running.ports)
            self._send(ServiceProcessStarted(running.start.process, running.head, url))

    async def _probe(self, running: _RunningProcess) -> None:
        """Report readings of an engine until cancelled."""
        server = self._client(running)
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            reading = await asyncio.to_thread(read_engine, server)
            self._send(ServiceReport(running.start.process, reading))

    async def _drain_node(self, running: _RunningProcess, node: str) -> None:
        if cause := await asyncio.to_thread(drain_node, self._client(running), node):
            self._send(ServiceNodeKept(running.start.process, node, cause))

    def _client(self, running: _RunningProcess) -> ServerClient:
        """Return a client of the engine whose head this process is."""
        url = make_url(self._machine, running.ports)
        return ServerClient(url, running.start.api_key, PROBE_TIMEOUT_SECONDS, is_own=True)

    def _choose_ports(self, needs_head: bool) -> ServicePorts:
        """Return free ports of the range for a head. Raises OSError if there are too few."""
        used = {
            port for each in self._processes.values() for port in (each.ports.api, each.ports.head)
        }
        first, last = self._machine.config.service_ports
        free: list[int] = []
        for port in range(first, last + 1):
            if port not in used:
                with suppress(OSError):
                    free.append(probe_port(self._machine.address, port))
            if len(free) == (2 if needs_head else 1):
                return ServicePorts(*free)
        raise OSError(f"too few ports of --service-ports {first}-{last} are free")
