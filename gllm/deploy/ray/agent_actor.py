"""Actor that Ray runs on another machine: it runs the agent of the machine, `gllm node --join`.

The agent is a process of its own, so that Ray's threads and signal handlers stay out of it. Agent
and actor end together: the kernel kills the agent when the actor's process dies, and the actor
exits some time after its agent, so that Ray restarts it, here or on another machine.
"""

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from gllm.deploy.ports import probe_port
from gllm.deploy.ray.bundles import node_name, port_offset, read_machines
from gllm.observability.child_process import ChildProcess, describe_exit
from gllm.runtime.messaging.parent_death import dying_command

RESTART_SECONDS = 2.0
"""Time from the end of an agent until Ray may start the next one."""
INVALID_STATUS = 2
"""Exit status of an agent whose command line or model is invalid on its machine."""
INVALID_RESTART_SECONDS = 30.0
"""The same as RESTART_SECONDS after INVALID_STATUS, because a person has to change something."""


class AgentActor:
    """Owner of one agent process; Ray creates it with `ray.remote`.

    Args:
        arguments: of `gllm node`, without name and ports.
        ports: flags with ports that the agent binds, such as `--data-port`, and the preferred
            ports; a free one is used instead of a port in use; 0 stays.
        head: id of the head's raylet.
    """

    def __init__(self, arguments: Sequence[str], ports: dict[str, int], head: str) -> None:
        # Here and not in the launcher: Ray may have moved the actor to another machine.
        import ray

        identity = ray.get_runtime_context().get_node_id()
        name = node_name(ray.util.get_node_ip_address(), identity)
        offset = port_offset(read_machines(ray.nodes()), identity, head)
        self._command = agent_command(arguments, name, ports, offset)
        # The kernel kills the agent when the thread that has created it ends.
        threading.Thread(target=self._run, name="gllm-agent", daemon=True).start()

    def _run(self) -> None:
        status = run_agent(self._command)
        print(f"gllm: {describe_exit(status, 'the agent')}", file=sys.stderr, flush=True)
        exit_actor(status)


def exit_actor(status: int | None) -> NoReturn:
    """End the process of an actor, some time after its child has exited with a status."""
    time.sleep(INVALID_RESTART_SECONDS if status == INVALID_STATUS else RESTART_SECONDS)
    os._exit(1)


def agent_command(
    arguments: Sequence[str], name: str, ports: dict[str, int], offset: int
) -> list[str]:
    """Return the command line of an agent on this machine; see `port_offset`."""
    free = {flag: free_port(port + offset) if port else 0 for flag, port in ports.items()}
    flags = [text for flag, port in free.items() for text in (flag, str(port))]
    return ["-m", "gllm", "node", *arguments, "--node-name", name, *flags]


def free_port(preferred: int) -> int:
    """Return the port, or a free one if it is in use, as by another engine."""
    for port in (preferred, 0):
        with suppress(OSError):
            return probe_port("", port)
    return preferred


def run_agent(command: Sequence[str]) -> int:
    """Run `python COMMAND...` on the calling thread, which it dies with; return its status."""
    return ChildProcess(dying_command(command)).wait()
