"""Processes of services on a node: their start, their log, the readings of a head, their end."""

import asyncio
import logging
import os
import signal
import socket
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from gllm.config.addresses import format_host_port
from gllm.messages.base import WireMessage
from gllm.messages.services import (
    ServiceNodeKept,
    ServiceProcessExited,
    ServiceProcessStarted,
    ServiceReport,
    StartServiceProcess,
)
from gllm.platform.service_command import (
    ServiceMachine,
    ServicePorts,
    make_command,
    make_environment,
    make_url,
)
from gllm.platform.service_probe import ServiceProbe
from gllm.runtime.parent_death import die_with_parent

log = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
"""Interval of the readings of an engine."""
KILL_SECONDS = 10.0
"""Time beyond that for running requests after which a process that does not end is killed."""
NUM_LAST_LINES = 20
"""Lines of a process's log that are kept, to find the cause of its exit."""
MAX_LINE_BYTES = 2**16
MAX_CAUSE_CHARACTERS = 500


@dataclass
class _RunningProcess:
    """A process of a service, from the command to start it until it was reaped."""

    start: StartServiceProcess
    ports: ServicePorts = field(default_factory=ServicePorts)
    process: Process | None = None
    end_signal: signal.Signals | None = None
    """Signal that ends the process; None while it shall run."""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_LAST_LINES))
    head: str = ""
    killer: asyncio.TimerHandle | None = None


class ServiceProcesses:
    """All processes of services on this node."""

    def __init__(self, machine: ServiceMachine, send: Callable[[WireMessage], None]) -> None:
        """Create a node without processes.

        Args:
            machine: properties that the processes share.
            send: queues a message to the master; it is dropped without a session.
        """
        self._machine = machine
        self._send = send
        self._processes: dict[int, _RunningProcess] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._drains: set[asyncio.Task[None]] = set()

    @property
    def living(self) -> list[int]:
        """Numbers of the processes that have not exited and are not about to."""
        return [number for number, each in self._processes.items() if each.end_signal is None]

    def start(self, command: StartServiceProcess) -> None:
        """Start a process; its start and its end are reported."""
        running = _RunningProcess(command)
        self._processes[command.process] = running
        self._tasks[command.process] = asyncio.create_task(self._run(running))

    def end(self, number: int) -> None:
        """Let a process finish its running requests and exit; it is killed if it does not."""
        running = self._processes.get(number)
        if running is None:
            # It has exited, which the master may not know.
            self._send(ServiceProcessExited(number, "it does not run"))
            return
        if running.end_signal is not None:
            return
        self._end(running, signal.SIGTERM)
        running.killer = asyncio.get_running_loop().call_later(
            running.start.shutdown_seconds + KILL_SECONDS, self._end, running, signal.SIGKILL
        )

    def drain_node(self, number: int, node: str) -> None:
        """Let a node leave the engine of a head; a refusal is reported."""
        running = self._processes.get(number)
        if running is None or running.process is None:
            self._send(ServiceNodeKept(number, node, "its head does not run"))
            return
        task = asyncio.create_task(self._drain_node(running, node))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    def keep(self, wanted: list[int]) -> None:
        """Kill all processes but some, and report those that are heads anew."""
        for number, running in self._processes.items():
            if number not in wanted:
                self._end(running, signal.SIGKILL)
            elif running.process is not None:
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
            self._end(running, signal.SIGKILL)
        if running.killer is not None:
            running.killer.cancel()
        del self._processes[number], self._tasks[number]
        level = logging.WARNING if running.end_signal is None else logging.INFO
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
        command = make_command(machine, start, running.ports, running.head)
        process = running.process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            limit=MAX_LINE_BYTES,
            env=make_environment(start.api_key),
            # Its workers die with it.
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        log.info("a process of service %s starts (pid %d)", start.service, process.pid)
        if running.end_signal is not None:
            self._end(running, running.end_signal)
        self._report_start(running)
        probing = asyncio.create_task(self._probe(running)) if is_head else None
        try:
            await self._forward_log(running)
            status = await process.wait()
        finally:
            if probing is not None:
                probing.cancel()
                await asyncio.gather(probing, return_exceptions=True)
        return describe_exit(status, list(running.last_lines))

    def _report_start(self, running: _RunningProcess) -> None:
        if running.start.node_rank == 0:
            url = make_url(self._machine, running.ports)
            self._send(ServiceProcessStarted(running.start.process, running.head, url))

    async def _probe(self, running: _RunningProcess) -> None:
        """Report readings of an engine until cancelled."""
        probe = ServiceProbe(make_url(self._machine, running.ports), running.start.api_key)
        try:
            while True:
                await asyncio.sleep(PROBE_SECONDS)
                self._send(ServiceReport(running.start.process, await probe.read()))
        finally:
            await probe.close()

    async def _drain_node(self, running: _RunningProcess, node: str) -> None:
        probe = ServiceProbe(make_url(self._machine, running.ports), running.start.api_key)
        try:
            if cause := await probe.drain_node(node):
                self._send(ServiceNodeKept(running.start.process, node, cause))
        finally:
            await probe.close()

    async def _forward_log(self, running: _RunningProcess) -> None:
        """Log the lines of a process, and keep the last ones."""
        assert running.process is not None
        output = running.process.stdout
        assert output is not None
        while True:
            try:
                line = await output.readline()
            except ValueError:
                # A line that is too long was dropped.
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            running.last_lines.append(text)
            log.info("%s: %s", running.start.service, text)

    def _end(self, running: _RunningProcess, number: signal.Signals) -> None:
        """Send a signal that ends a process, now or once it has started."""
        running.end_signal = number
        if running.process is not None and running.process.returncode is None:
            with suppress(ProcessLookupError):
                running.process.send_signal(number)

    def _choose_ports(self, needs_head: bool) -> ServicePorts:
        """Return free ports of the range for a head. Raises OSError if there are too few."""
        used = {
            port for each in self._processes.values() for port in (each.ports.api, each.ports.head)
        }
        first, last = self._machine.ports
        free = (
            port
            for port in range(first, last + 1)
            if port not in used and _is_free(self._machine.address, port)
        )
        ports = [next(free, 0) for _ in range(2 if needs_head else 1)]
        if 0 in ports:
            raise OSError(f"too few ports of --service-ports {first}-{last} are free")
        return ServicePorts(*ports)


def describe_exit(status: int, last_lines: list[str]) -> str:
    """Return the cause of a process's exit in words.

    Args:
        status: exit status; negative for a signal.
        last_lines: of its log. A program that ends with an error says why in its last line.
    """
    if status < 0:
        names = {each.value: each.name for each in signal.Signals}
        return f"it was killed by {names.get(-status, f'signal {-status}')}"
    text = next((line for line in reversed(last_lines) if line.strip()), "") if status else ""
    cause = f"it exited with {status}"
    return f"{cause}: {text[:MAX_CAUSE_CHARACTERS]}" if text else cause


def _is_free(address: str, port: int) -> bool:
    """Return True if nothing listens at a port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True
