"""Node, the machine that runs workers: its interface, and worker processes of this host.

The supervisor decides which workers exist and which stages they run. A node starts and ends them,
and creates the files and sockets between them.
This module imports no torch.
"""

import asyncio
import logging
import os
import shutil
import signal
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from gllm.kernels.native.builds import select_build
from gllm.observability.child_process import ChildProcess, module_command
from gllm.recovery.liveness import ProcessSample
from gllm.recovery.placement import LOCAL_NODE, EdgeSpec, Placement, source_dials
from gllm.runtime.head.assignment import (
    KvMoverConnection,
    NodeAssignment,
    ParentMessage,
    StageAssignment,
    WorkerIdentity,
    encode_parent_message,
)
from gllm.runtime.messaging.socket_folder import create_socket_folder
from gllm.transport.descriptors import DescriptorChannel, DescriptorError, create_channels
from gllm.transport.edge import Edge, create_edge
from gllm.transport.link.commands import LinkPeer, OpenLinkEdge
from gllm.transport.region import Region, create_region

OnExit = Callable[[int, str], None]
"""Called with the sender of a worker that has exited and been reaped, and a description."""

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""Time that a worker has to exit before it is killed."""
DUMP_SIGNAL = signal.SIGUSR1
"""Signal at which a worker writes the stacks of its threads."""
MAX_STACKS_BYTES = 2**16
"""Bytes at the end of a worker's stacks that are read."""


class RemoteEdges(Protocol):
    """Interface to open and close the connections to pipeline stages on other machines."""

    def open(self, command: OpenLinkEdge, edge: Edge) -> None:
        """Connect this machine's end of an edge."""

    def close_edges(self, epoch: int) -> None:
        """Close the edges of an epoch and of all earlier epochs."""


class Node(ABC):
    """Base class of a machine that runs workers: starts, kills and inspects them."""

    def __init__(self, name: str = "gllm", node_name: str = LOCAL_NODE) -> None:
        """Create a node.

        Args:
            name: begins the names of its files.
            node_name: name of this machine in placements.
        """
        self.node_name = node_name
        self.remote_edges: RemoteEdges | None = None
        """Connects edges to other machines; None in an engine on one machine."""
        self.kv_memory: dict[int, int] = {}
        """Descriptors of the files in which the workers of the present epoch have their KV
        caches, by sender; empty without --kv-transfer. They are closed by the next `assign`."""
        self._kv_files: dict[tuple[int, int], int] = {}
        """Descriptors of the files of KV caches that outlive their workers, by stage and rank."""
        self._hash_file: int | None = None
        """Descriptor of the file with the hashes of their blocks, on the driver's machine."""
        self._name = name
        self._driver_folder: Path | None = None
        """Private folder of the socket of the current epoch's driver."""

    @abstractmethod
    def watch(self, on_exit: OnExit) -> None:
        """Report exits of workers from now on; needs a running event loop.

        on_exit: called once per worker that exits before `stop`.
        """

    @abstractmethod
    def spawn(self, identity: WorkerIdentity) -> None:
        """Start a worker.

        Raises:
            OSError: the system has no process or descriptor left.
        """

    @abstractmethod
    def kill(self, sender: int) -> None:
        """Kill a worker; the exit is reported as every other exit."""

    @abstractmethod
    def sample(self, sender: int) -> ProcessSample | None:
        """Return the state of a worker's process; None if it has exited or is unknown."""

    @abstractmethod
    def dump_stacks(self, sender: int) -> None:
        """Make a worker write the stacks of its threads, to be read with `read_stacks`."""

    @abstractmethod
    def read_stacks(self, sender: int) -> str:
        """Return the stacks that a worker has written, also after a crash within `on_exit`."""

    @abstractmethod
    async def stop(self) -> None:
        """Wait until the workers have exited after the shutdown message; kill late workers."""

    @abstractmethod
    def _send(self, assignment: StageAssignment) -> None:
        """Send a worker its assignment; the descriptors in it are closed afterwards."""

    def connect_kv_mover(self, connection: KvMoverConnection) -> None:
        """Send the driver its end of a channel to the process that transfers KV blocks.

        The caller still owns the descriptor.

        Raises:
            NotImplementedError: the node has no processes.
        """
        raise NotImplementedError

    @property
    def driver_address(self) -> str:
        """Address to which the stages of this machine connect for the driver; empty for none."""
        return "" if self._driver_folder is None else f"ipc://{self._driver_folder}/driver"

    def prepare(self, assignment: NodeAssignment, folder: Path, node: str | None = None) -> None:
        """Make this machine's workers measure their speed, or load layers while their stage serves.

        Args:
            assignment: assignment with `is_probe`, or with the number of a planned change, or of
                what a standby worker maps.
            folder: folder of the model.
            node: the only machine whose workers prepare; None for all.
        """
        if node not in (None, self.node_name):
            return
        own = [worker.sender for worker in assignment.placement.workers_on(self.node_name)]
        for sender in [assignment.standby] if assignment.standby else own:
            self._send(
                StageAssignment(
                    assignment.placement,
                    sender,
                    assignment.config,
                    str(folder),
                    "",
                    is_probe=assignment.is_probe,
                    change=assignment.change,
                    replaceable=own if assignment.standby else [],
                )
            )

    def assign(
        self,
        assignment: NodeAssignment,
        folder: Path,
        plan_record: int | None = None,
        output_lengths: dict[int, list[int]] | None = None,
    ) -> None:
        """Send each worker of this machine its stage, new connections and the driver's address.

        Args:
            assignment: stages, options and connections until the next recovery.
            folder: folder of the model.
            plan_record: descriptor of the file for the driver's plans in flight; stays open here.
            output_lengths: output lengths from before the last recovery, for the scheduler.

        Raises:
            OSError: a file cannot be created; no worker was sent anything.
            ValueError: the machines of a connection cannot reach each other; no worker was sent
                anything.
        """
        self.on_epoch_ready()
        placement = assignment.placement
        if self.remote_edges is not None:
            self.remote_edges.close_edges(placement.epoch - 1)
        self._driver_folder = create_socket_folder(f"{self._name}-driver-")
        self.close_kv_memory()
        with ExitStack() as files:
            edges, regions = self._create_files(assignment, files)
            if assignment.config.has_kv_mover:
                self._create_kv_memory(placement)
            can_keep = assignment.config.keeps_kv_cache
            if not (can_keep and assignment.keeps_kv_cache):
                self.close_kv_files()
            if can_keep:
                self._create_kv_files(placement)
            for worker in placement.workers_on(self.node_name):
                place = worker.stage, worker.rank
                has_driver = place == (0, 0)
                self._send(
                    StageAssignment(
                        placement,
                        worker.sender,
                        assignment.config,
                        str(folder),
                        self.driver_address,
                        next((edge for spec, edge in edges if spec.target_place == place), None),
                        [edge for spec, edge in edges if spec.source_place == place],
                        regions.get(worker.stage),
                        plan_record if has_driver else None,
                        self.kv_memory.get(worker.sender),
                        self._kv_files.get(place),
                        self._hash_file if has_driver else None,
                        assignment.restart_cause,
                        assignment.num_resumed_requests,
                        output_lengths or {} if has_driver else {},
                    )
                )

    def _create_files(
        self, assignment: NodeAssignment, files: ExitStack
    ) -> tuple[list[tuple[EdgeSpec, Edge]], dict[int, Region]]:
        """Return new edges, and a new region for each stage with several ranks.

        Args:
            assignment: assignment of the next epoch.
            files: closes the descriptors in this process.

        Raises:
            OSError: a file cannot be created.
            ValueError: the nodes of an edge cannot reach each other.
        """
        placement = assignment.placement
        nodes = placement.nodes
        edges: list[tuple[EdgeSpec, Edge]] = []
        for spec in placement.edges:
            source, target = nodes[spec.source_place], nodes[spec.target_place]
            if self.node_name not in (source, target):
                continue
            name = f"{self._name}-edge-{spec.number}"
            is_remote = source != target
            edge = create_edge(name, spec.transport, is_remote, assignment.num_lanes)
            files.callback(edge.close)
            edges.append((spec, edge))
            if edge.is_remote:
                self._open_remote(assignment, spec.number, edge, (source, target))
        regions: dict[int, Region] = {}
        for stage, num_ranks in enumerate(placement.degrees):
            if num_ranks > 1 and nodes[stage, 0] == self.node_name:
                regions[stage] = create_region(f"{self._name}-region-{stage}")
                files.callback(regions[stage].close)
        return edges, regions

    def _create_kv_memory(self, placement: Placement) -> None:
        """Create an empty file for the KV cache of each of this machine's workers.

        Raises:
            OSError: a file cannot be created.
        """
        for worker in placement.workers_on(self.node_name):
            name = f"{self._name}-kv-{worker.sender}"
            self.kv_memory[worker.sender] = os.memfd_create(name)

    def _create_kv_files(self, placement: Placement) -> None:
        """Create the files of KV caches that are missing on this machine, empty.

        Raises:
            OSError: a file cannot be created.
        """
        try:
            for worker in placement.workers_on(self.node_name):
                place = worker.stage, worker.rank
                if place not in self._kv_files:
                    name = f"{self._name}-kv-{worker.stage}.{worker.rank}"
                    self._kv_files[place] = os.memfd_create(name)
                if place == (0, 0) and self._hash_file is None:
                    self._hash_file = os.memfd_create(f"{self._name}-hashes")
        except OSError:
            self.close_kv_files()
            raise

    def close_kv_files(self) -> None:
        """Close the files of KV caches; their memory is free once their workers have ended."""
        while self._kv_files:
            os.close(self._kv_files.popitem()[1])
        if self._hash_file is not None:
            os.close(self._hash_file)
            self._hash_file = None

    def close_kv_memory(self) -> None:
        """Close this process's descriptors of KV caches, whose workers have ended or will."""
        while self.kv_memory:
            os.close(self.kv_memory.popitem()[1])

    def _open_remote(
        self, assignment: NodeAssignment, number: int, edge: Edge, nodes: tuple[str, str]
    ) -> None:
        """Connect this machine's end of an edge to another machine.

        Args:
            assignment: assignment of the next epoch.
            number: number of the edge.
            edge: files of this machine's end.
            nodes: machine that sends, machine that receives.

        Raises:
            OSError: the system has no process or descriptor left.
            ValueError: the nodes cannot reach each other.
        """
        source, target = (_peer_of(assignment, node) for node in nodes)
        dials = source_dials(source.node, source.address, target.node, target.address)
        is_sender = nodes[0] == self.node_name
        peer = target if is_sender else source
        assert self.remote_edges is not None, "an engine on several machines has links"
        command = OpenLinkEdge(
            assignment.placement.epoch,
            number,
            is_sender,
            dials == is_sender,
            peer,
            edge.num_lanes,
        )
        self.remote_edges.open(command, edge)

    def on_epoch_ready(self) -> None:
        """Remove the driver's address, because all workers have connected."""
        if self._driver_folder is not None:
            shutil.rmtree(self._driver_folder, ignore_errors=True)
            self._driver_folder = None


def _peer_of(assignment: NodeAssignment, node: str) -> LinkPeer:
    """Return how a node is reached. Raises ValueError if the assignment does not say it."""
    try:
        return assignment.peers[node]
    except KeyError:
        raise ValueError(f"the assignment has no address of node {node!r}") from None


@dataclass
class WorkerProcess:
    """Worker process with the parent's descriptors: the message channel and its stack-dump file."""

    process: ChildProcess
    channel: DescriptorChannel
    """Socket pair over which messages and file descriptors are sent to the process."""
    stacks: int
    """Descriptor of the file to which the process writes its stacks, for example in a crash."""

    def close(self) -> None:
        """Close the parent's ends, after the process has been reaped."""
        self.process.unwatch()
        self.channel.close()
        os.close(self.stacks)


class LocalNode(Node):
    """Runs the workers as child processes on this machine.

    The first processes start with the node, before their stages are known: they import torch while
    the parent imports its own dependencies and reads the model's configuration.
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
        # Not at exit, because workers die with this process.
        weakref.finalize(self, _kill_all, self.workers, self._unused, os.getpid()).atexit = False
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
        """Report exits of workers from now on; needs a running event loop."""
        self._on_exit = on_exit

    def spawn(self, identity: WorkerIdentity) -> None:
        """Start a worker.

        Uses a process that was started before if there is one.
        """
        worker = self._unused.popleft() if self._unused else self._start_process()
        sender = identity.sender
        self.workers[sender] = worker
        worker.process.watch(partial(self._on_worker_exit, sender))
        self._send(identity)

    def kill(self, sender: int) -> None:
        """Kill a worker; the exit is reported as every other exit."""
        if sender in self.workers:
            self.workers[sender].process.kill()

    def sample(self, sender: int) -> ProcessSample | None:
        """Return the state of a worker's process; None if it has exited or is unknown."""
        if sender not in self.workers:
            return None
        usage = self.workers[sender].process.read_usage()
        return None if usage is None else ProcessSample(*usage)

    def dump_stacks(self, sender: int) -> None:
        """Make a worker write the stacks of its threads, to be read with `read_stacks`.

        A stopped process writes them once it is continued.
        """
        if sender in self.workers:
            self.workers[sender].process.send_signal(DUMP_SIGNAL)

    def read_stacks(self, sender: int) -> str:
        """Return the stacks that a worker has written, also after a crash within `on_exit`."""
        if sender not in self.workers:
            return ""
        stacks = self.workers[sender].stacks
        begin = max(0, os.fstat(stacks).st_size - MAX_STACKS_BYTES)
        return os.pread(stacks, MAX_STACKS_BYTES, begin).decode(errors="replace")

    async def stop(self) -> None:
        """Wait until the workers have exited after the shutdown message; kill late workers."""
        self._on_exit = None
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    for worker in [*self.workers.values()]:
                        await worker.process.exited()
        finally:
            self.close()

    def close(self) -> None:
        """Kill all processes and remove all files."""
        _kill_all(self.workers, self._unused, os.getpid())
        if self._kernel_ratios is not None:
            os.close(self._kernel_ratios)
            self._kernel_ratios = None
        self.close_kv_memory()
        self.close_kv_files()
        self.on_epoch_ready()

    def connect_kv_mover(self, connection: KvMoverConnection) -> None:
        """Send the driver its end of a channel to the process that transfers KV blocks."""
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
                module_command("gllm.runtime.worker", *numbers), pass_fds=descriptors
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


def _kill_all(
    workers: dict[int, WorkerProcess], unused: deque[WorkerProcess], process: int
) -> None:
    """Kill and reap all processes of a node, unless this process is a fork of the node's own."""
    if os.getpid() != process:
        return
    for worker in (*workers.values(), *unused):
        worker.process.kill()
        worker.process.wait()
        worker.close()
    workers.clear()
    unused.clear()
