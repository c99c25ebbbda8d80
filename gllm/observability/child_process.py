"""Child processes: their command lines, their exit as an event, and its cause in words.

It is in this room because gllm/text, gllm/runtime and gllm/deploy start processes, and an exit is a
part of the record of a run. gllm/deploy/logged_process.py adds a log and an orderly end.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gllm.observability.child_start import IMPORT_ERROR_STATUS

MAX_CAUSE_CHARACTERS = 500
"""Length limit of the line of a log that is a part of the cause of an exit."""
IMPORT_FAILURE = "a module cannot be imported, see its traceback"
"""Words for IMPORT_ERROR_STATUS in descriptions of exits."""
KILLED = " was killed by "
"""Words for a signal in descriptions of exits."""


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module with this Python interpreter, as `python -m` does.

    All child processes of gllm that are Python modules are started by it. The child imports from
    its current directory only if this process does, because `python -m` would search it before the
    standard library: whoever can write there, or has a `queue.py`, would replace modules.

    Args:
        module: dotted name of the module.
        arguments: its arguments.
    """
    safe_path = [] if _imports_from_current_directory() else ["-P"]
    return [sys.executable, *safe_path, "-m", module, *arguments]


def _imports_from_current_directory() -> bool:
    """Return True if this process searches the current directory before the standard library."""
    standard = os.path.dirname(os.__file__)
    before = sys.path[: sys.path.index(standard)] if standard in sys.path else sys.path
    try:
        return "" in before or os.getcwd() in before
    except FileNotFoundError:
        # The directory was deleted, so that nothing can be imported from it.
        return False


def has_import_failure(description: str) -> bool:
    """Return True if `describe_exit` has said that the modules of a process cannot be imported."""
    return IMPORT_FAILURE in description


def was_killed(description: str) -> bool:
    """Return True if `describe_exit` has said that a signal ended the process."""
    return KILLED in description


def describe_exit(status: int, subject: str = "it", last_lines: Sequence[str] = ()) -> str:
    """Describe how a process exited, for an error message, such as `it exited with 1`.

    Args:
        status: exit status; negative for a signal.
        subject: name of the process in the sentence.
        last_lines: last lines of the process's log. The last line that is not blank is appended if
            the process failed, because it usually names the error.
    """
    if status < 0:
        names = {member.value: member.name for member in signal.Signals}
        return f"{subject}{KILLED}{names.get(-status, f'signal {-status}')}"
    if status == IMPORT_ERROR_STATUS:
        return f"{subject} exited with {status}: {IMPORT_FAILURE}"
    text = next((line for line in reversed(last_lines) if line.strip()), "") if status else ""
    cause = f"{subject} exited with {status}"
    return f"{cause}: {text[:MAX_CAUSE_CHARACTERS]}" if text else cause


def read_process_usage(process_id: int) -> tuple[bool, float] | None:
    """Return whether a process is stopped, and its CPU time in seconds; None if it is gone.

    It is stopped by a signal or a debugger (state T in /proc).
    """
    try:
        text = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return None
    # After the name, which may contain anything: state, then 10 fields, user and system time.
    fields = text.rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return fields[0] in "Tt", ticks / os.sysconf("SC_CLK_TCK")


class ChildProcess(subprocess.Popen[bytes]):
    """Child process whose exit can be awaited in an event loop or in a thread.

    Args:
        command: program and arguments.
        options: keyword arguments of subprocess.Popen; without `stdin` the process has no input.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self._exit_descriptor: int | None = None
        """Descriptor that is readable once the process has exited, while that is watched."""
        super().__init__(command, **({"stdin": subprocess.DEVNULL} | options))

    def read_usage(self) -> tuple[bool, float] | None:
        """Return the usage of the process; see `read_process_usage`."""
        return read_process_usage(self.pid)

    def watch(self, on_exit: Callable[[], None]) -> None:
        """Call a function in the running event loop once the process has exited."""
        self.unwatch()
        self._loop = asyncio.get_running_loop()
        self._exit_descriptor = os.pidfd_open(self.pid)
        self._loop.add_reader(self._exit_descriptor, self._on_exit, on_exit)

    def unwatch(self) -> None:
        """Cancel `watch`; does nothing if no function is registered."""
        if self._exit_descriptor is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._exit_descriptor)
            os.close(self._exit_descriptor)
            self._exit_descriptor = None

    async def exited(self) -> None:
        """Return once the process has exited and was reaped."""
        if self.poll() is None:
            event = asyncio.Event()
            self.watch(event.set)
            try:
                await event.wait()
            finally:
                self.unwatch()

    def describe_exit(self, subject: str = "it", last_lines: Sequence[str] = ()) -> str:
        """Wait until the process exits and describe how; see the function `describe_exit`."""
        return describe_exit(self.wait(), subject, last_lines)

    def _on_exit(self, on_exit: Callable[[], None]) -> None:
        self.unwatch()
        self.wait()
        on_exit()
