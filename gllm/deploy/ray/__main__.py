"""Launcher process of an engine's agents: `python -m gllm.deploy.ray`.

Reads a `LaunchSpec` from standard input, writes a `LaunchEvent` to standard output, and keeps the
agents running until standard input ends, which is when the head closes it or dies.
"""

import contextlib
import os
import sys
import threading
from typing import IO

import msgspec
import setproctitle

from gllm.deploy.ray.agents import LaunchEvent, LaunchSpec, RayAgents
from gllm.deploy.ray.ray_cluster import POLL_SECONDS, LaunchError, RayUnavailableError
from gllm.observability.child_start import leave_signals_to_parent
from gllm.observability.logs import LogConfig, configure_logging

END_SECONDS = 10.0
"""Time for the shutdown after standard input has ended; Ray may not answer any more."""


def main() -> int:
    """Reserve machines in Ray for an engine and run `gllm node` on them, until standard input ends.

    Reads a `LaunchSpec` from standard input and writes a `LaunchEvent` to standard output, as JSON.

    Returns:
        The exit status: 1 if Ray cannot be reached or lacks resources.
    """
    # Ray writes to standard output, which is for events.
    events = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    setproctitle.setproctitle("gllm-ray")
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=LaunchSpec)
    configure_logging(LogConfig(spec.log_level, spec.log_format))
    is_ended = threading.Event()
    threading.Thread(target=_watch_input, args=(is_ended,), daemon=True).start()
    try:
        agents = RayAgents(spec, is_ended=is_ended)
        # The head closes standard input; Ray handles signals too.
        leave_signals_to_parent()
        try:
            event = agents.start()
            leave_signals_to_parent()
            _write(events, event)
            while not is_ended.wait(POLL_SECONDS):
                agents.poll()
        finally:
            agents.close()
    except LaunchError as error:
        _write(
            events, LaunchEvent(error=str(error), may_pass=isinstance(error, RayUnavailableError))
        )
        return 1
    return 0


def _watch_input(is_ended: threading.Event) -> None:
    """Wait for the end of standard input, and end the process if its shutdown takes too long."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    is_ended.set()
    threading.Event().wait(END_SECONDS)
    os._exit(1)


def _write(events: IO[bytes], event: LaunchEvent) -> None:
    with contextlib.suppress(BrokenPipeError):
        events.write(msgspec.json.encode(event) + b"\n")
        events.flush()


if __name__ == "__main__":
    sys.exit(main())
