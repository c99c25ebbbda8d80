"""Execution of the actions that `gllm.recovery.recovery` decides on.

Actions are messages to workers, starts and ends of processes, and calls of the client. What they
lead to is reported to an `ActionListener`.
"""

import asyncio
import logging
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import zmq

from gllm.config.engine import EngineConfig
from gllm.messages.base import WireMessage
from gllm.messages.lifecycle import CloseGeneration, InitializeCache, StageLoaded
from gllm.observability.logs import LogConfig
from gllm.recovery.actions import (
    Action,
    AssignGeneration,
    AttachClient,
    BeginChange,
    ChangeShape,
    ChooseLayers,
    CloseInstances,
    DetachClient,
    DismissNode,
    GiveUp,
    InitializeCaches,
    KillWorker,
    MeasureWorkers,
    PrepareLayers,
    RejectParked,
    SpawnWorker,
    WarmUp,
)
from gllm.recovery.node_layout import NodeShape
from gllm.recovery.placement import Placement
from gllm.recovery.records import RecoveryState
from gllm.recovery.recovery import Recovery
from gllm.runtime.driver.plan_record import read_uncommitted
from gllm.runtime.head.assignment import (
    KvMoverConnection,
    NodeAssignment,
    WorkerIdentity,
    resolve_scheduler,
)
from gllm.runtime.head.client import EngineClient
from gllm.runtime.head.commands import CommandRunner
from gllm.runtime.head.deaths import DeathLog
from gllm.runtime.head.edge_gate import EdgeGate
from gllm.runtime.head.kv_events import KvEventSource
from gllm.runtime.head.kv_memory import count_placement_blocks, limit_blocks
from gllm.runtime.head.kv_mover import EngineKvMover
from gllm.runtime.head.node_group import NodeGroup
from gllm.runtime.head.worker_channels import WorkerChannels

log = logging.getLogger(__name__)


class ActionListener(Protocol):
    """Receiver of the events that actions lead to."""

    def on_exit(self, sender: int, description: str) -> None:
        """Handle the end of a worker, here of one that could not be started."""

    def on_assignment_failed(self, generation: int, cause: str) -> None:
        """Handle a generation that could not be assigned to the workers."""

    def on_all_measured(self) -> None:
        """Divide the layers, because all workers have measured their speed."""

    def on_shape_changed(self, shape: NodeShape) -> None:
        """Handle other stages, or other nodes of the stages, from the next generation on."""

    def on_memory_short(self, generation: int, cause: str) -> bool:
        """Handle memory that cannot hold one sequence; return False if no other node can help."""

    def on_warm(self, generation: int, error: str) -> None:
        """Handle the end of a warm-up request; `error` is empty on success."""

    def on_give_up(self, cause: str) -> None:
        """Handle the end of the engine."""


@dataclass
class Head:
    """The head process's connections to the workers."""

    run: int
    """Number of this start of the head process."""
    channels: WorkerChannels
    nodes: NodeGroup
    model_folder: Path
    logs: LogConfig


class ActionExecutor:
    """Executes actions in order, and keeps the state of the present generation."""

    def __init__(
        self,
        config: EngineConfig,
        recovery: Recovery,
        client: EngineClient,
        deaths: DeathLog,
        listener: ActionListener,
    ) -> None:
        """Create an executor; `head` has to be set before the first action.

        Args:
            config: of the engine, with max_model_len resolved.
            recovery: knows the placement of the present generation.
            client: of the driver.
            deaths: log of the deaths.
            listener: receiver of events.
        """
        self.head: Head | None = None
        self.commands = CommandRunner()
        self.kv_events = KvEventSource()
        """Changes of the prefix cache of the present driver."""
        self.kv_mover = EngineKvMover(
            self._connect_kv_mover,
            config.kv_transfer,
            config.kv_transfer_encoding,
            config.kv_transfer_address,
        )
        self.loaded: dict[int, StageLoaded] = {}
        """Reports of the present generation's workers, by sender."""
        self.num_blocks = 0
        """KV blocks of each worker."""
        self.kv_bytes = 0
        """Bytes of the KV cache over all workers."""
        self.edges = EdgeGate()
        """Edges between nodes of the present generation."""
        self._initializing = 0
        """Generation whose workers have loaded, and whose caches are due when the edges are."""
        self._block_nodes: list[str] = []
        """Name of the node of each worker when the KV blocks were counted."""
        self._config = config
        self._recovery = recovery
        self._client = client
        self._deaths = deaths
        self._listener = listener
        self._actions: deque[Action] = deque()
        """Actions that have not been executed."""
        self._is_executing = False
        self._plans: int | None = None
        """Descriptor of the generation's plan record."""

    def read_suspects(self) -> set[int]:
        """Return the wire ids of the sequences with rows in uncommitted plans."""
        return set() if self._plans is None else read_uncommitted(self._plans)

    def send_to_driver(self, message: WireMessage) -> None:
        """Send a message to the driver of the present generation."""
        assert self._recovery.placement is not None
        self.connections.channels.send(self._recovery.placement.senders[0], message)

    def _connect_kv_mover(self, generation: int, descriptor: int) -> None:
        """Give the present driver its end of a channel to the KV mover."""
        assert self._recovery.placement is not None
        connection = KvMoverConnection(generation, descriptor)
        self.connections.nodes.local.connect_kv_mover(
            self._recovery.placement.senders[0], connection
        )

    def close(self) -> None:
        """Drop the actions that have not been executed, and release the plan record."""
        self._actions.clear()
        self.kv_mover.close()
        self._close_plan_record()

    def _close_plan_record(self) -> None:
        if self._plans is not None:
            os.close(self._plans)
            self._plans = None

    def fail_all(self, cause: str) -> None:
        """End all requests and commands with an error, because the engine has died."""
        self._client.fail_all(cause)
        self._detach_driver()
        self.commands.fail_all(cause)

    def execute(self, actions: list[Action]) -> None:
        """Execute actions; those that follow from them are executed after them."""
        self._actions.extend(actions)
        if self._is_executing:
            return
        self._is_executing = True
        try:
            while self._actions:
                self._execute(self._actions.popleft())
        finally:
            self._is_executing = False

    @property
    def connections(self) -> Head:
        """Connections to the workers, after the start."""
        assert self.head is not None, "the engine has not started"
        return self.head

    def _execute(self, action: Action) -> None:
        match action:
            case SpawnWorker(sender, node=node):
                self._spawn(sender, node)
            case KillWorker(sender):
                self.connections.nodes.kill(sender)
            case CloseInstances(senders=senders):
                for sender in senders:
                    self.connections.channels.send(sender, CloseGeneration())
            case MeasureWorkers(placement):
                head = self.connections
                head.nodes.measure(placement, self._config, head.model_folder)
            case ChooseLayers():
                self._listener.on_all_measured()
            case PrepareLayers(number, placement, cause, node):
                head = self.connections
                log.info("%s: the layers are loaded while the engine serves", cause)
                head.nodes.prepare(placement, self._config, head.model_folder, number, node)
            case BeginChange(kind, cause):
                self._deaths.begin_change(kind, cause)
                log.info("%s; requests: %d", cause, self._client.num_requests)
            case DismissNode(node, cause):
                self._dismiss(node, cause)
            case ChangeShape(shape):
                self._listener.on_shape_changed(shape)
            case AssignGeneration(placement):
                self._assign(placement)
            case InitializeCaches(generation):
                self._initializing = generation
                self._initialize_if_connected()
            case WarmUp(generation):
                self._warm_up(generation)
            case DetachClient(cause):
                self._client.detach(cause)
                self._detach_driver()
                self.commands.fail_all(cause)
            case AttachClient():
                self._client.attach(self.send_to_driver)
            case RejectParked(cause):
                cause = f"{cause} from: {self._deaths.cause}"
                log.error("%s", cause)
                self._client.reject_parked(cause)
            case GiveUp(cause):
                self._listener.on_give_up(cause)

    def _dismiss(self, node: str, cause: str) -> None:
        """End the membership of a node, and forget its workers."""
        log.info("%s", cause)
        for sender in self.connections.nodes.dismiss(node, cause):
            self.connections.channels.forget(sender)
            self._deaths.heartbeats.pop(sender, None)

    def _spawn(self, sender: int, node: str) -> None:
        head = self.connections
        try:
            address = ""
            if remote := head.nodes.place(sender, node):
                head.channels.expect_remote(sender, remote.session.send)
            else:
                address = head.channels.expect(sender)
            head.nodes.spawn(WorkerIdentity(head.run, sender, address, head.logs))
        except (OSError, zmq.ZMQError) as error:
            description = f"a process could not be started: {error}"
            asyncio.get_running_loop().call_soon(self._listener.on_exit, sender, description)

    def _assign(self, placement: Placement) -> None:
        """Begin a generation, unless the files for it cannot be created."""
        head = self.connections
        # A warm-up request of the generation before may not have ended.
        self._client.detach(self._deaths.cause)
        self._detach_driver()
        self.loaded.clear()
        self.edges.begin(placement)
        self._close_plan_record()
        try:
            self._plans = os.memfd_create("gllm-plans")
            head.nodes.assign(
                NodeAssignment(
                    placement, self._config, self._deaths.cause, self._client.num_requests
                ),
                head.model_folder,
                self._plans,
                self._client.output_lengths,
            )
        except (OSError, ValueError) as error:
            log.warning("the stages could not be assigned: %s", error)
            self._listener.on_assignment_failed(placement.generation, str(error))
            return
        head.channels.advance(placement.generation)

    def on_edge_opened(self, generation: int, edge: int) -> None:
        """Handle an edge between nodes that is connected; the last one lets the stages start."""
        if self.edges.on_opened(generation, edge) and generation == self._initializing:
            self._initialize_if_connected()

    def _initialize_if_connected(self) -> None:
        """Start the stages, unless edges between nodes are not connected yet."""
        if self._recovery.state is not RecoveryState.INITIALIZING:
            return
        if self.edges.is_open:
            self._initializing = 0
            self._initialize_caches()
        else:
            pairs = (f"{source} and {target}" for source, target in self.edges.missing_pairs)
            log.info("waiting for the data connections between %s", ", ".join(pairs))

    def _initialize_caches(self) -> None:
        """Divide the memory for KV blocks: every worker gets the same number."""
        max_model_len, placement = self._config.max_model_len, self._recovery.placement
        assert max_model_len is not None
        assert placement is not None
        num_blocks = self._count_blocks(placement, max_model_len)
        try:
            resolve_scheduler(self._config, placement, num_blocks)
        except ValueError as error:
            nodes = ", ".join(dict.fromkeys(worker.node for worker in placement.workers))
            cause = f"the memory of the nodes {nodes} does not suffice: {error}"
            if not self._listener.on_memory_short(placement.generation, cause):
                raise
            return
        self.num_blocks = num_blocks
        self.kv_bytes = num_blocks * sum(worker.block_bytes for worker in self.loaded.values())
        for sender in self.loaded:
            self.connections.channels.send(sender, InitializeCache(num_blocks))

    def _count_blocks(self, placement: Placement, max_model_len: int) -> int:
        """Return the number of KV blocks of a generation.

        Requests were accepted by the size of the first cache, so a later one is not larger. It can
        be smaller if layers have moved to other machines, but there is always one sequence of full
        length if the memory suffices at all, so that every accepted request can be resumed.
        """
        scheduler = self._config.scheduler
        num_needed = -(-max_model_len // scheduler.block_size)
        most = self.num_blocks or scheduler.max_num_seqs * num_needed
        nodes = [worker.node for worker in placement.workers]
        has_own_memory = any(each.available_bytes is not None for each in self.loaded.values())
        has_moved, self._block_nodes = nodes != self._block_nodes, nodes
        if self.num_blocks and not (has_own_memory or has_moved):
            return self.num_blocks
        count = count_placement_blocks(self._config.kv_cache_memory, placement, self.loaded)
        if self.num_blocks and has_moved:
            limit = limit_blocks(placement, self.loaded)
            count = int(min(max(count, num_needed), limit))
        return min(count, most)

    def _detach_driver(self) -> None:
        """End what belongs to the present driver, which has ended."""
        self.kv_events.detach()
        self.kv_mover.end_generation()

    def _warm_up(self, generation: int) -> None:
        """Generate one token."""
        head = self.connections
        head.nodes.on_generation_ready()
        assert self._recovery.placement is not None
        self.kv_mover.open(generation, self._recovery.placement.senders, head.nodes.local.kv_memory)
        loop = asyncio.get_running_loop()
        # Before the first request, so that token ids of all blocks are known.
        self.kv_events.attach(self.send_to_driver)
        stream = self._client.submit_warm_up(self.send_to_driver)

        def read_end() -> None:
            end = stream.pop_deltas()[0].end
            if end is not None:
                # Later, because the client is still delivering the step's output.
                loop.call_soon(self._listener.on_warm, generation, end.error)

        stream.set_listener(read_end)
