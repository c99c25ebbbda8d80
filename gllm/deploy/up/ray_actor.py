"""Actor that owns one process of a plan in a Ray cluster.

The process is one of its own, so that Ray's threads and signal handlers stay out of it. Process and
actor end together: the kernel kills the process when the actor's process dies, and the actor exits
some time after its process, so that Ray restarts it, here or on another machine.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from typing import Any

import msgspec

from gllm.config.node_environment import remove_launcher
from gllm.deploy.ray.agent_actor import (
    INVALID_RESTART_SECONDS,
    INVALID_STATUS,
    RESTART_SECONDS,
)
from gllm.deploy.up.child_process import NUM_LAST_LINES, describe_exit
from gllm.deploy.up.ray_groups import ProcessTask, make_process

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
        self._process: subprocess.Popen[str] | None = None
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._is_draining = False
        self._status: int | None = None
        # The kernel kills the process when the thread that has created it ends.
        threading.Thread(target=self._run, name="gllm-process", daemon=True).start()

    def status(self) -> bytes:
        """Return a `ProcessStatus` as JSON."""
        cause = "" if self._status is None else describe_exit(self._status, [*self._last_lines])
        status = ProcessStatus(
            self._spec.url,
            self._status is None and is_ready(self._spec.url),
            self._status is not None,
            self._status == INVALID_STATUS,
            cause,
        )
        return msgspec.json.encode(status)

    def drain(self) -> None:
        """Let the process finish its requests and exit; the actor stays, to report its end."""
        self._is_draining = True
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def _run(self) -> None:
        command = [sys.executable, "-m", "gllm.deploy.ray.agent_actor", str(os.getpid()), "-m"]
        # Ray has restricted the GPUs.
        self._process = subprocess.Popen(
            [*command, self._spec.module, *self._spec.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=remove_launcher(os.environ),
        )
        if self._is_draining:
            self._process.send_signal(signal.SIGTERM)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last_lines.append(line.rstrip())
            print(f"{self._spec.name} | {line.rstrip()}", file=sys.stderr, flush=True)
        self._status = self._process.wait()
        if self._is_draining:
            return
        is_invalid = self._status == INVALID_STATUS
        time.sleep(INVALID_RESTART_SECONDS if is_invalid else RESTART_SECONDS)
        os._exit(1)


def find_head(ray: Any, group: Any) -> str | None:
    """Return the address of the machine that has the first bundle of a group; None if none has."""
    identity = ray.util.placement_group_table(group)["bundles_to_node_id"].get(0)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return addresses.get(identity)


def is_ready(url: str) -> bool:
    """Return True if a process of this machine is ready."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=PROBE_TIMEOUT_SECONDS) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False
