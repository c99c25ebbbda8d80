"""Worker processes of this host: start, identity, exit, and the evidence that a crash leaves.

This module imports no torch.
"""

import asyncio
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gllm.kernels.native.builds import select_build
from gllm.observability.child_process import ChildProcess
from gllm.recovery.liveness import ProcessSample
from gllm.recovery.placement import LOCAL_NODE
from gllm.runtime.head.assignment import (
    KvMoverConnection,
    ParentMessage,
    WorkerIdentity,
    encode_parent_message,
)
from gllm.runtime.head.node import Node, OnExit
from gllm.transport.descriptors import DescriptorChannel, DescriptorError, create_channels

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""Time that a worker has to exit before it is killed."""
DUMP_SIGNAL = signal.SIGUSR1
"""Signal at which a worker writes the stacks of its threads."""
MAX_STACKS_BYTES = 2**16
"""Bytes at the end of a worker's stacks that are read."""


@dataclass
class WorkerProcess:
    """A worker process and the parent's ends of what connects them."""

    process: ChildProcess
    channel: DescriptorChannel
    stacks: int
    """Descriptor of the file to which the process writes its stacks, for example in a crash."""

    def close(self) -> None:
        """Close the parent's ends; the process has been reaped."""
        self.process.unwatch()
        self.channel.close()
        os.close(self.stacks)


class LocalNode(Node):
    """Workers as processes of this host.

    The first ones start with the node, before it is known what they will be: they import torch
    while the parent imports its own dependencies and reads the model's configuration.
    """

    def __init__(
        self,
        num_processes: int,
        node_name: str = LOCAL_NODE,
        popen: Callable[..., ChildProcess] = ChildProcess,
    ) -> None:
        """Start the first processes.

        Args:
            num_processes: number of them.
            node_name: name of this machine in placements.
            popen: starts a process; see ChildProcess.

        Raises:
            ValueError: GLLM_CPU_KERNELS names a build that cannot be used.
        """
        select_build()
        super().__init__(node_name=node_name)
        self._popen = popen
        self.workers: dict[int, WorkerProcess] = {}
        """Workers that have not been reaped, by sender."""
        self._unused: deque[WorkerProcess] = deque()
        """Processes without an identity."""
        self._on_exit: OnExit | None = None
        self._kernel_ratios: int | None = os.memfd_create("gllm-kernel-ratios")
        """File in which the workers share measurements of compiled kernels."""
        try:
            for _ in range(num_processes):
                self._unused.append(self._start_process())
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> list[ChildProcess]:
        """All processes that have not been reaped, the oldest first."""
        return [worker.process for worker in (*self.workers.values(), *self._unused)]

    def watch(self, on_exit: OnExit) -> None:
        """See Node."""
        self._on_exit = on_exit

    def spawn(self, identity: WorkerIdentity) -> None:
        """See Node; uses a process that was started before if there is one."""
        worker = self._unused.popleft() if self._unused else self._start_process()
        sender = identity.sender
        self.workers[sender] = worker
        worker.process.watch(partial(self._on_worker_exit, sender))
        self._send(identity)

    def kill(self, sender: int) -> None:
        """See Node."""
        if sender in self.workers:
            self.workers[sender].process.kill()

    def sample(self, sender: int) -> ProcessSample | None:
        """See Node."""
        if sender not in self.workers:
            return None
        try:
            stat = Path(f"/proc/{self.workers[sender].process.pid}/stat").read_text()
        except OSError:
            return None
        # After the name, which may contain anything: state, then 10 fields, user and system time.
        fields = stat.rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return ProcessSample(fields[0] in "Tt", ticks / os.sysconf("SC_CLK_TCK"))

    def dump_stacks(self, sender: int) -> None:
        """See Node; a stopped process writes them once it is continued."""
        if sender in self.workers:
            self.workers[sender].process.send_signal(DUMP_SIGNAL)

    def read_stacks(self, sender: int) -> str:
        """See Node."""
        if sender not in self.workers:
            return ""
        stacks = self.workers[sender].stacks
        begin = max(0, os.fstat(stacks).st_size - MAX_STACKS_BYTES)
        return os.pread(stacks, MAX_STACKS_BYTES, begin).decode(errors="replace")

    async def stop(self) -> None:
        """See Node."""
        self._on_exit = None
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                for worker in [*self.workers.values()]:
                    await worker.process.exited()
        self.close()

    def close(self) -> None:
        """Kill all processes and remove all files."""
        for worker in (*self.workers.values(), *self._unused):
            worker.process.kill()
            worker.process.wait()
            worker.close()
        self.workers.clear()
        self._unused.clear()
        if self._kernel_ratios is not None:
            os.close(self._kernel_ratios)
            self._kernel_ratios = None
        self.close_kv_memory()
        self.on_epoch_ready()

    def connect_kv_mover(self, connection: KvMoverConnection) -> None:
        """Give the driver its end of a channel to the KV mover."""
        self._send(connection)

    def _send(self, message: ParentMessage) -> None:
        """Send a worker a message; one that does not receive it is killed."""
        sender = message.sender
        if sender not in self.workers:
            return
        try:
            self.workers[sender].channel.send(*encode_parent_message(message))
        except DescriptorError as error:
            log.warning("%s", error)
            self.kill(sender)

    def _start_process(self) -> WorkerProcess:
        """Start a process that waits for its identity.

        Raises:
            OSError: the system has no process or descriptor left.
        """
        assert self._kernel_ratios is not None, "the node is closed"
        own, inherited = create_channels()
        stacks = os.memfd_create("gllm-stacks")
        descriptors = [inherited.fileno(), stacks, self._kernel_ratios]
        numbers = map(str, (*descriptors, os.getpid()))
        try:
            process = self._popen(
                [sys.executable, "-m", "gllm.runtime.worker", *numbers], pass_fds=descriptors
            )
        except BaseException:
            own.close()
            os.close(stacks)
            raise
        finally:
            inherited.close()
        return WorkerProcess(process, own, stacks)

    def _on_worker_exit(self, sender: int) -> None:
        """Report the exit of a worker."""
        process = self.workers[sender].process
        try:
            if self._on_exit is not None:
                self._on_exit(sender, process.describe_exit(f"process {process.pid}"))
        finally:
            self.workers.pop(sender).close()
