"""Actor that owns one process of a plan in a Ray cluster.

The process is one of its own, so that Ray's threads and signal handlers stay out of it. Process and
actor end together: the kernel kills the process when the actor's process dies, and the actor exits
some time after its process, so that Ray restarts it, here or on another machine.
"""

import asyncio
import os
import signal
import sys
import threading
from typing import Any

import msgspec

from gllm.config.node_environment import remove_launcher
from gllm.deploy.logged_process import LoggedProcess
from gllm.deploy.ray.agent_actor import INVALID_STATUS, exit_actor
from gllm.deploy.ray.plan_groups import ProcessTask, make_process
from gllm.deploy.server_client import ServerClient
from gllm.runtime.messaging.parent_death import dying_command

PROBE_TIMEOUT_SECONDS = 1.0


class ProcessStatus(msgspec.Struct, frozen=True):
    """State of an actor's process."""

    url: str
    """URL of its API on its machine."""
    is_ready: bool
    has_ended: bool
    is_invalid: bool
    """True if it cannot run whatever is done: its command line or model is invalid."""
    cause: str = ""
    """Cause of its end."""


class ProcessActor:
    """Owner of one process; Ray creates it with `ray.remote`.

    Args:
        task: `ProcessTask` as JSON.
        group: placement group of the engine, whose first bundle has the head.
    """

    def __init__(self, task: bytes, group: Any) -> None:
        # Here and not in the launcher: Ray may have moved the actor to another machine.
        import ray

        own = ray.util.get_node_ip_address()
        self._spec = make_process(
            msgspec.json.decode(task, type=ProcessTask), own, find_head(ray, group) or own
        )
        self._child = LoggedProcess(
            lambda line: print(f"{self._spec.name} | {line}", file=sys.stderr, flush=True)
        )
        self._server = ServerClient(self._spec.url, None, PROBE_TIMEOUT_SECONDS, is_own=True)
        self._cause = ""
        """Cause of the end of the process; empty while it runs."""
        # The kernel kills the process when the thread that has created it ends.
        threading.Thread(target=self._run, name="gllm-process", daemon=True).start()

    def status(self) -> bytes:
        """Return a `ProcessStatus` as JSON."""
        has_ended = bool(self._cause)
        status = ProcessStatus(
            self._spec.url,
            not has_ended and self._server.is_ready(),
            has_ended,
            has_ended and self._child.status == INVALID_STATUS,
            self._cause,
        )
        return msgspec.json.encode(status)

    def drain(self) -> None:
        """Let the process finish its requests and exit; the actor stays, to report its end."""
        self._child.send(signal.SIGTERM)

    def _run(self) -> None:
        command = dying_command(["-m", self._spec.module, *self._spec.arguments])
        # Ray has restricted the GPUs.
        self._child.start(command, remove_launcher(os.environ), dies_with_parent=False)
        self._cause = asyncio.run(self._child.wait())
        if self._child.end_signal is None:
            exit_actor(self._child.status)


def find_head(ray: Any, group: Any) -> str | None:
    """Return the address of the machine that has the first bundle of a group; None if none has."""
    identity = ray.util.placement_group_table(group)["bundles_to_node_id"].get(0)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return addresses.get(identity)
