"""Processes of this machine: the lines that they write, their end and the cause of it."""

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from subprocess import PIPE, STDOUT

from gllm.config.node_environment import remove_launcher
from gllm.deploy.server_client import ReadinessProbe, ServerClient
from gllm.observability.child_process import ChildProcess, module_command
from gllm.plan.processes import ProcessSpec
from gllm.runtime.messaging.parent_death import die_with_parent

KILL_SECONDS = 10.0
"""Time beyond that for running requests after which a process that does not end is killed."""
PROBE_TIMEOUT_SECONDS = 5.0
NUM_LAST_LINES = 20
"""Lines of a process's log that are kept, to find the cause of its exit."""
MAX_LINE_BYTES = 2**16
"""Size limit of a line; a longer one is dropped."""


class LoggedProcess:
    """Child process whose output is passed on line by line.

    It dies with its parent. `end` may be called before `start`, which then ends it at once.
    """

    def __init__(self, on_line: Callable[[str], None], kill_seconds: float = KILL_SECONDS) -> None:
        """Create a process that does not run.

        Args:
            on_line: receives each line that the process writes, without its line break.
            kill_seconds: time beyond that for running requests after which the process is killed.
        """
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self.end_signal: signal.Signals | None = None
        """Signal that ends the process; None while it should run."""
        self._on_line = on_line
        self._kill_seconds = kill_seconds
        self._process: ChildProcess | None = None
        self._killer: asyncio.TimerHandle | None = None

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        has_own_group: bool = False,
        dies_with_parent: bool = True,
    ) -> None:
        """Start the child process.

        Args:
            command: program and arguments.
            environment: all environment variables of the process.
            has_own_group: True to keep signals of the terminal, such as Ctrl-C, from the process.
            dies_with_parent: True to have the kernel kill the process when the calling thread ends;
                False for a command that arranges that itself.

        Raises:
            OSError: the process cannot be started.
        """
        self._process = ChildProcess(
            command,
            stdout=PIPE,
            stderr=STDOUT,
            env=environment,
            start_new_session=has_own_group,
            preexec_fn=partial(die_with_parent, os.getpid()) if dies_with_parent else None,
        )
        if self.end_signal is not None:
            self.send(self.end_signal)

    async def wait(self) -> str:
        """Forward output lines until the process exits; return a description of its exit."""
        assert self._process is not None
        try:
            await self._forward_lines()
            await self._process.exited()
        finally:
            if self._killer is not None:
                self._killer.cancel()
        return self._process.describe_exit(last_lines=self.last_lines)

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while the process runs."""
        return None if self._process is None else self._process.poll()

    async def kill_group(self) -> None:
        """Kill the process and its children; `start` needs `has_own_group` for it."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.exited()

    def end(self, shutdown_seconds: float) -> None:
        """Send SIGTERM, now or once the process has started, and SIGKILL after a timeout.

        Args:
            shutdown_seconds: time for running requests; SIGKILL follows `kill_seconds` after it.
        """
        if self.end_signal is None:
            self.send(signal.SIGTERM)
            self._killer = asyncio.get_running_loop().call_later(
                shutdown_seconds + self._kill_seconds, self.send, signal.SIGKILL
            )

    def send(self, number: signal.Signals) -> None:
        """Send a signal that ends the process, immediately or once it has started."""
        self.end_signal = number
        if self._process is not None:
            self._process.send_signal(number)

    async def _forward_lines(self) -> None:
        assert self._process is not None
        output = asyncio.StreamReader(MAX_LINE_BYTES)
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), self._process.stdout
        )
        try:
            while True:
                try:
                    line = await output.readline()
                except ValueError:
                    # A line that is too long was dropped.
                    continue
                if not line:
                    return
                text = line.decode(errors="replace").rstrip()
                self.last_lines.append(text)
                self._on_line(text)
        finally:
            pipe.close()


class LocalProcess:
    """Router or engine process on this machine; implements `RunningProcess`.

    Args:
        spec: command line, environment and URL of the process.
        on_line: called with the name of the process and a line of its output.
        make_command: returns program and arguments of a process; None to use this Python.
        environment: base environment, extended by that of `spec`; None for that of this process.
            Variables of launchers such as Slurm are removed.
        kill_seconds: time after the drain timeout at which the process is killed.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        on_line: Callable[[str, str], None],
        make_command: Callable[[ProcessSpec], Sequence[str]] | None = None,
        environment: Mapping[str, str] | None = None,
        kill_seconds: float = KILL_SECONDS,
    ) -> None:
        self._spec = spec
        self._command = (make_command or python_command)(spec)
        self._environment = os.environ if environment is None else environment
        self._child = LoggedProcess(lambda line: on_line(spec.name, line), kill_seconds)
        # The certificate of an own process is not a matter of trust.
        server = ServerClient(
            spec.url, None, PROBE_TIMEOUT_SECONDS, is_own=True, certificate=spec.certificate
        )
        self._probe = ReadinessProbe(server, spec.title)

    @property
    def is_ending(self) -> bool:
        """True if its end was requested."""
        return self._child.end_signal is not None

    @property
    def has_failed(self) -> bool:
        """True if it has ended with an error or could not be started."""
        return self._child.status != 0

    async def run(self) -> str:
        """Start the process, wait for its exit and return the cause. Raises OSError."""
        environment = remove_launcher(self._environment) | self._spec.environment
        self._child.start(self._command, environment, has_own_group=True)
        return await self._child.wait()

    async def is_ready(self) -> bool:
        """Return True if it is ready for requests."""
        return await asyncio.to_thread(self._probe.is_ready)

    def end(self) -> None:
        """Drain the process and end it; it is killed after a timeout."""
        self._child.end(self._spec.shutdown_seconds)

    def kill(self) -> None:
        """Kill the process."""
        self._child.send(signal.SIGKILL)


def python_command(spec: ProcessSpec) -> list[str]:
    """Return the command line that runs a router or engine with this Python interpreter."""
    return module_command(spec.module, *spec.arguments)
