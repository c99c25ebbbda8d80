"""Actors that own a process: of a plan, or the agent of a machine, `gllm node --join`.

Process and actor end together: the kernel kills the process when the actor's process dies, and the
actor exits some time after its process, so that Ray restarts it, here or on another machine.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from gllm.config.node_environment import remove_launcher
from gllm.deploy.logged_process import LoggedProcess
from gllm.deploy.ray.bundles import port_offset, ray_node_name, read_ray_machines
from gllm.observability.child_process import module_command
from gllm.options.exit_status import INVALID_STATUS
from gllm.options.ports import probe_port

RESTART_SECONDS = 2.0
"""Time from the end of a process until Ray may start the next one."""
INVALID_RESTART_SECONDS = 30.0
"""The same as RESTART_SECONDS after INVALID_STATUS, because a person has to change something."""


class ChildActor:
    """Ray actor that runs one child process; if the process exits, Ray starts the actor again.

    It is a process of its own, so that Ray's threads and signal handlers do not affect it.
    """

    def start(self, name: str, command: Sequence[str]) -> None:
        """Run a command as a child process, on a thread.

        Args:
            name: prefix of the process's output lines.
            command: program and arguments.
        """
        self._child = LoggedProcess(
            lambda line: print(f"{name} | {line}", file=sys.stderr, flush=True)
        )
        self._cause = ""
        """Cause of the end of the process; empty while it runs."""
        # The kernel kills the process when the thread that has created it ends.
        threading.Thread(target=self._run, args=(command,), name="gllm-child", daemon=True).start()

    def _run(self, command: Sequence[str]) -> None:
        # Ray has restricted the GPUs.
        environment = remove_launcher(os.environ)
        self._child.start(dying_command(command), environment, dies_with_parent=False)
        self._cause = asyncio.run(self._child.wait())
        if self._child.end_signal is None:
            print(f"gllm: {self._cause}", file=sys.stderr, flush=True)
            is_invalid = self._child.status == INVALID_STATUS
            time.sleep(INVALID_RESTART_SECONDS if is_invalid else RESTART_SECONDS)
            # Ray starts the actor again.
            os._exit(1)


class AgentActor(ChildActor):
    """Ray actor that runs `gllm node`, the process of a machine that is not the head.

    Args:
        arguments: arguments of `gllm node`, without name and ports.
        ports: preferred ports by flag, such as `--data-port`; a free port replaces one that is in
            use; 0 is passed on as it is.
        head: Ray's id of the node with the engine's head.
    """

    def __init__(self, arguments: Sequence[str], ports: dict[str, int], head: str) -> None:
        # Here and not in the launcher: Ray may have moved the actor to another machine.
        import ray

        identity = ray.get_runtime_context().get_node_id()
        name = ray_node_name(ray.util.get_node_ip_address(), identity)
        offset = port_offset(read_ray_machines(ray.nodes()), identity, head)
        self.start("agent", agent_command(arguments, name, ports, offset))


def agent_command(
    arguments: Sequence[str], name: str, ports: dict[str, int], offset: int
) -> list[str]:
    """Return the command line that runs `gllm node` on this machine, with free ports.

    Args:
        arguments: arguments of `gllm node`, without name and ports.
        name: name of the node.
        ports: preferred ports by flag; 0 is passed on as it is.
        offset: number added to the preferred ports.
    """
    free = {flag: free_port(port + offset) if port else 0 for flag, port in ports.items()}
    flags = [text for flag, port in free.items() for text in (flag, str(port))]
    return module_command("gllm", "node", *arguments, "--node-name", name, *flags)


def free_port(preferred: int) -> int:
    """Return the preferred TCP port, or a free one if it is in use."""
    for port in (preferred, 0):
        with suppress(OSError):
            return probe_port("", port)
    return preferred


def dying_command(command: Sequence[str]) -> list[str]:
    """Return a command that runs another one, which is killed when the starting thread exits.

    It is for parents with threads of other libraries, in which no code may run after a fork.
    """
    return module_command("gllm.runtime.messaging.parent_death", str(os.getpid()), *command)
