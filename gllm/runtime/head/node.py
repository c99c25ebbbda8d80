"""Interface of a node, the machine that runs workers, and the files and sockets between them.

The supervisor decides which workers there are and which stages they run; a node carries that out.
This module imports no torch.
"""

import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from gllm.recovery.liveness import ProcessSample
from gllm.recovery.placement import LOCAL_NODE, EdgeSpec, Placement, source_dials
from gllm.runtime.head.assignment import (
    KvMoverConnection,
    NodeAssignment,
    StageAssignment,
    WorkerIdentity,
)
from gllm.transport.edge import Edge, create_edge
from gllm.transport.link.commands import LinkPeer, OpenLinkEdge
from gllm.transport.region import Region, create_region

OnExit = Callable[[int, str], None]
"""Called with the sender of a worker that has exited and been reaped, and a description."""


class RemoteEdges(Protocol):
    """Connects the edges between a worker of this machine and one of another machine."""

    def open(self, command: OpenLinkEdge, edge: Edge) -> None:
        """Connect this machine's end of an edge; see LinkProcess."""

    def close_edges(self, epoch: int) -> None:
        """Close the edges of an epoch and of all earlier ones."""


class Node(ABC):
    """Workers that subclasses run, as processes or within this one."""

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
        """Kill a worker; its exit is reported as that of any other."""

    @abstractmethod
    def sample(self, sender: int) -> ProcessSample | None:
        """Return the state of a worker's process; None if it has exited or has none of its own."""

    @abstractmethod
    def dump_stacks(self, sender: int) -> None:
        """Make a worker write the stacks of its threads, which `read_stacks` returns soon after."""

    @abstractmethod
    def read_stacks(self, sender: int) -> str:
        """Return the stacks that a worker has written; also after a crash, within `on_exit`."""

    @abstractmethod
    async def stop(self) -> None:
        """Wait until the workers have exited after the shutdown message; kill those that do not."""

    @abstractmethod
    def _send(self, assignment: StageAssignment) -> None:
        """Send a worker its assignment; the descriptors in it are closed afterwards."""

    def connect_kv_mover(self, connection: KvMoverConnection) -> None:
        """Give the driver its end of a channel to the KV mover; its descriptor stays the caller's.

        Raises:
            NotImplementedError: the node has no processes.
        """
        raise NotImplementedError

    @property
    def driver_address(self) -> str:
        """Address to which the stages of this machine connect for the driver; empty for none."""
        return "" if self._driver_folder is None else f"ipc://{self._driver_folder}/driver"

    def prepare(self, assignment: NodeAssignment, folder: Path, node: str | None = None) -> None:
        """Let this machine's workers measure their speed, or load layers while their stage serves.

        Args:
            assignment: with `is_probe` or the number of a planned change.
            folder: of the model.
            node: the only machine whose workers prepare; None for all.
        """
        if node not in (None, self.node_name):
            return
        for worker in assignment.placement.workers_on(self.node_name):
            self._send(
                StageAssignment(
                    assignment.placement,
                    worker.sender,
                    assignment.config,
                    str(folder),
                    "",
                    is_probe=assignment.is_probe,
                    change=assignment.change,
                )
            )

    def assign(
        self,
        assignment: NodeAssignment,
        folder: Path,
        plan_record: int | None = None,
        output_lengths: dict[int, list[int]] | None = None,
    ) -> None:
        """Send each of this machine's workers its stage, with new files and driver's address.

        Args:
            assignment: of the next epoch.
            folder: of the model.
            plan_record: descriptor of the file for the driver's plans in flight; stays open here.
            output_lengths: output lengths of earlier epochs, for the scheduler.

        Raises:
            OSError: a file cannot be created; no worker was sent anything.
            ValueError: the nodes of an edge cannot reach each other; no worker was sent anything.
        """
        self.on_epoch_ready()
        placement = assignment.placement
        if self.remote_edges is not None:
            self.remote_edges.close_edges(placement.epoch - 1)
        self._driver_folder = Path(tempfile.mkdtemp(prefix=f"{self._name}-driver-"))
        self.close_kv_memory()
        with ExitStack() as files:
            edges, regions = self._create_files(assignment, files)
            if assignment.config.kv_transfer is not None:
                self._create_kv_memory(placement)
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
            assignment: of the next epoch.
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
            edge = create_edge(name, "auto", is_remote, assignment.num_lanes)
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

    def close_kv_memory(self) -> None:
        """Close this process's descriptors of KV caches, whose workers have ended or will."""
        while self.kv_memory:
            os.close(self.kv_memory.popitem()[1])

    def _open_remote(
        self, assignment: NodeAssignment, number: int, edge: Edge, nodes: tuple[str, str]
    ) -> None:
        """Connect this machine's end of an edge to another machine.

        Args:
            assignment: of the next epoch.
            number: of the edge.
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
        """Remove the driver's address: all workers have connected, and nothing else may."""
        if self._driver_folder is not None:
            shutil.rmtree(self._driver_folder, ignore_errors=True)
            self._driver_folder = None


def _peer_of(assignment: NodeAssignment, node: str) -> LinkPeer:
    """Return how a node is reached. Raises ValueError if the assignment does not say it."""
    try:
        return assignment.peers[node]
    except KeyError:
        raise ValueError(f"the assignment has no address of node {node!r}") from None
