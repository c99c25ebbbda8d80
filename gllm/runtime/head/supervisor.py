"""Supervisor: the life of an engine's worker processes, seen from the head process.

`gllm.recovery.recovery` decides; the supervisor executes its decisions: messages to workers, starts
and ends of processes, calls of the client. `EventReceiver` turns what arrives into events for the
recovery. This module imports no torch.
"""

import asyncio
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from random import Random

import zmq

from gllm.config.engine import EngineConfig
from gllm.config.nodes import NodesConfig
from gllm.messages.base import WireMessage
from gllm.messages.codec import decode_for_head
from gllm.messages.handoff import HandoffCommand
from gllm.messages.kv_cache import AdoptKvBlocks
from gllm.messages.lifecycle import (
    CloseEpoch,
    InitializeCache,
    ResetPrefixCache,
    Shutdown,
    StageLoaded,
)
from gllm.models.identity import describe_numerics
from gllm.observability.logs import LogConfig
from gllm.recovery.actions import (
    Action,
    AssignEpoch,
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
from gllm.recovery.admission_state import AdmissionState
from gllm.recovery.kept_blocks import intersect_slots
from gllm.recovery.placement import Placement
from gllm.recovery.records import RecoveryLimits, RecoveryState
from gllm.recovery.recovery import Recovery
from gllm.runtime.driver.plan_record import read_uncommitted
from gllm.runtime.head.assignment import (
    KvMoverConnection,
    NodeAssignment,
    WorkerIdentity,
    resolve_scheduler,
)
from gllm.runtime.head.client import EngineClient
from gllm.runtime.head.cluster_head import ClusterHead
from gllm.runtime.head.deaths import DeathLog
from gllm.runtime.head.deaths import EngineError as EngineError
from gllm.runtime.head.event_receiver import EventReceiver
from gllm.runtime.head.kv_events import KvEventSource
from gllm.runtime.head.kv_mover import EngineKvMover
from gllm.runtime.head.layer_planner import (
    LayerPlanner,
    Machine,
    list_free_memories,
    list_placement_memories,
)
from gllm.runtime.head.node import Node
from gllm.runtime.head.node_group import EdgeGate, NodeGroup
from gllm.runtime.head.worker_channels import HeadSocket, WorkerChannels
from gllm.runtime.messaging.bus import Hub
from gllm.runtime.messaging.command_runner import CommandRunner
from gllm.runtime.messaging.owned_context import create_context
from gllm.scheduler.intact_slots import NO_SLOTS, IntactSlots
from gllm.scheduler.kv_memory import KvDivision, divide_kv_memory

log = logging.getLogger(__name__)

STOPPED = "the engine was stopped"
"""Cause of the end of an engine without a failure."""


class Supervisor:
    """Starts the workers of an engine, restarts them after failures, and shuts them down.

    It executes the decisions of the recovery's state machine, in the head process.
    """

    channels: WorkerChannels
    """Messages to and from the workers, after `start`."""
    nodes: Node
    """Machines that run the workers, after `start`: `group` if there are several."""
    _receiver: EventReceiver
    """Set by `start`."""
    _folder: Path
    _logs: LogConfig
    _run: int
    """Number of this start of the head process."""

    def __init__(
        self,
        config: EngineConfig,
        planner: LayerPlanner,
        on_progress: Callable[[int, int], None],
        nodes: NodesConfig | None = None,
    ) -> None:
        """Create the supervisor of an engine that has not started.

        Args:
            config: configuration of the engine, with max_model_len resolved.
            planner: divides the layers among the stages.
            on_progress: called while weights are first loaded, with the bytes loaded and in total.
            nodes: machines of the engine; None for this one alone.
        """
        self.config = config
        self.planner = planner
        self.client = EngineClient(length_predictor=config.length_predictor)
        self.cause = ""
        """Reason for which the engine is dead."""
        self.died = asyncio.Event()
        """Set when the engine is dead."""
        self.deaths = DeathLog(config.crash_folder)
        self._limits = RecoveryLimits(
            config.max_restarts,
            config.recovery_timeout,
            # Without restarts nothing could use a standby worker.
            config.standby_workers if config.max_restarts else 0,
            spare_preloads=nodes is not None and nodes.spare_preloads,
            standbys_map=config.weight_cache is not None and not config.is_emulated,
            # On one machine nothing waits for another one.
            node_return_seconds=0.0 if nodes is None else nodes.node_return_timeout,
            join_seconds=0.0 if nodes is None else nodes.join_timeout,
        )
        self._jitter = Random(secrets.randbits(64))
        self.recovery = self._create_recovery()
        self.group: NodeGroup | None = None
        """All machines by name; None for this one alone."""
        self.commands: CommandRunner[int] = CommandRunner()
        """Commands to workers, by sender."""
        self.kv_events = KvEventSource()
        """Changes of the prefix cache of the present driver."""
        self.kv_mover = EngineKvMover(
            self._connect_kv_mover,
            config.kv_transfer,
            config.kv_transfer_encoding,
            config.kv_transfer_address,
            freeze_timeout=config.freeze_timeout,
            speed=config.emulation.emulated_speed,
            send_to_node=self._send_to_node,
            disk=config.kv_cache_disk or "",
        )
        self.kv_mover.on_change = self._notify_changed
        self.loaded: dict[int, StageLoaded] = {}
        """Reports of the present epoch's workers, by sender."""
        self.intact: dict[int, IntactSlots] = {}
        """Slots of KV blocks of the epoch before that each of these workers can use, by sender."""
        self.num_blocks = self.num_state_slots = 0
        """KV blocks and state slots of each worker; 0 before the weights are loaded."""
        self.kv_bytes = 0
        """Bytes of the KV cache over all workers."""
        self.edges = EdgeGate()
        """Edges between machines of the present epoch."""
        self._on_progress = on_progress
        self._block_nodes: list[str] = []
        """Name of the node of each worker when the KV blocks were counted."""
        self._plan_record: int | None = None
        """Descriptor of the record of the plans in flight of the present epoch."""
        self._actions: deque[Action] = deque()
        """Actions that have not been executed."""
        self._is_executing = False
        self._cluster: ClusterHead | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._has_connections = False
        """True once `start` has created the channels and nodes."""
        self._timer: asyncio.TimerHandle | None = None
        """Calls the recovery at its next deadline."""
        self._start_error: Exception | None = None
        self._has_changed = asyncio.Event()
        """Set after each event."""
        self._change_listeners: list[Callable[[], None]] = []
        self._has_given_up = False
        self._is_draining = False
        self._is_sleeping = False
        self._is_stopped = False

    @property
    def state(self) -> str:
        """loading, ready, recovering, sleeping, draining or dead."""
        return self.admission.name

    @property
    def admission(self) -> AdmissionState:
        """Facts that decide whether requests are taken."""
        if self.recovery.is_over:
            phase = "dead"
        elif not self.recovery.has_been_ready:
            phase = "loading"
        else:
            is_ready = self.recovery.state is RecoveryState.READY
            phase = "ready" if is_ready else "recovering"
        return AdmissionState(phase, self._is_sleeping, self._is_draining, self.is_recovery_overdue)

    @property
    def recovering_since(self) -> float | None:
        """Time at which the running recovery began; None if none runs."""
        return None if self.recovery.is_over else self.recovery.recovering_since

    @property
    def is_recovery_overdue(self) -> bool:
        """True if the running recovery has taken longer than `recovery_timeout`."""
        return self.recovery.is_overdue

    @property
    def has_stalled(self) -> bool:
        """True if requests are pending, no step has ended in time, and none is likely to end."""
        timeout = self.config.health_timeout
        if self.client.stalled_seconds < timeout:
            return False
        return not self._receiver.has_living_step(timeout)

    @property
    def state_cause(self) -> str:
        """Reason of the death or of the running recovery; otherwise empty."""
        return self.cause or (self.deaths.cause if self.recovering_since is not None else "")

    @property
    def numerics(self) -> str:
        """Description of all that decides the rounding on all stages."""
        reports = [self.loaded.get(sender) for sender in self.senders]
        executors = (report.numerics for report in reports if report is not None)
        return describe_numerics(
            executors, list(map(len, self.planner.layers)), self.recovery.degrees
        )

    @property
    def senders(self) -> list[int]:
        """Workers of the present epoch, by stage, then by rank."""
        return [] if self.recovery.placement is None else self.recovery.placement.senders

    @property
    def node_stages(self) -> dict[str, list[int]]:
        """Stages of each node in the present epoch, by its name."""
        return {} if self.recovery.placement is None else self.recovery.placement.node_stages

    @property
    def num_stale_frames(self) -> int:
        """Messages of earlier epochs that arrived late and were dropped."""
        num_proxied = 0 if self.group is None else self.group.num_stale
        return self.channels.num_stale + num_proxied if self._has_connections else 0

    async def start(
        self, folder: Path, node: Node, logs: LogConfig, cluster: ClusterHead | None = None
    ) -> None:
        """Load a model and run one token through all stages.

        Args:
            folder: folder of the model.
            node: node of the workers.
            logs: configuration of the workers' logs.
            cluster: nodes that have joined; None for this machine alone.

        Raises:
            EngineError: a stage failed, or the engine was stopped before.
            ValueError: the memory does not suffice for the configuration.
        """
        if self._is_stopped:
            raise EngineError(self.cause)
        try:
            receiver = self._connect(folder, node, logs, cluster)
            self.execute(self.recovery.start(time.monotonic()))
            if cluster is not None:
                receiver.add_spares(cluster.members)
            while self.state == "loading":
                await self._has_changed.wait()
                self._has_changed.clear()
            if self._start_error is not None:
                raise self._start_error
            if self.state == "dead":
                raise EngineError(self.cause)
        except BaseException:
            await self.stop()
            raise

    def _connect(
        self, folder: Path, node: Node, logs: LogConfig, cluster: ClusterHead | None
    ) -> EventReceiver:
        """Create the sessions with workers and nodes; the arguments are those of `start`."""
        context = self._context = create_context(self)
        self._cluster, self._folder, self._logs = cluster, folder, logs
        self._run = secrets.randbits(64) if cluster is None else cluster.run
        hub = Hub(context, self._run, decode_for_head)
        self.channels = WorkerChannels(hub, HeadSocket(hub))
        self.group = None if cluster is None else NodeGroup(node)
        self.nodes = self.group or node
        receiver = self._receiver = EventReceiver(self, self._on_progress, cluster)
        self._has_connections = True
        hub.start(receiver.on_messages, receiver.on_session_lost)
        self.nodes.watch(receiver.on_exit)
        if cluster is not None:
            cluster.begin(context, self, receiver)
        return receiver

    def set_nodes(self, nodes: Sequence[str], machines: Mapping[str, Machine]) -> None:
        """Set the node of each stage, with the head's node first, and the machines by name."""
        self.planner.set_nodes(nodes, machines)
        self.recovery = self._create_recovery(nodes)

    def add_change_listener(self, listener: Callable[[], None]) -> None:
        """Call a function after each event that may change the state."""
        self._change_listeners.append(listener)

    async def drain(self, seconds: float) -> None:
        """Wait until running requests have ended, at most for a number of seconds."""
        self._is_draining = self.admission.phase in ("ready", "recovering")
        self._notify_changed()
        deadline = time.monotonic() + seconds
        while self.client.num_requests and self.state == "draining" and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """End the workers; running requests end with an error."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self.die(STOPPED)
        self._actions.clear()
        # The steps run from the last one to the first, each even if an earlier one fails.
        async with AsyncExitStack() as steps:
            steps.callback(self.deaths.close, self._has_given_up and self.config.max_restarts > 0)
            steps.callback(self._close_plan_record)
            steps.callback(self.kv_mover.close)
            if self._context is not None:
                steps.callback(self._context.destroy, 0)
            if self._has_connections:
                steps.callback(self.channels.close)
            if self._cluster is not None:
                is_failure = self.cause != STOPPED
                steps.push_async_callback(self._cluster.stop, self.cause, is_failure)
            if self._has_connections:
                steps.push_async_callback(self.nodes.stop)

    def set_sleeping(self, is_on: bool) -> None:
        """Let users of the engine refuse new requests, or accept them again."""
        self._is_sleeping = is_on
        self._notify_changed()

    async def reset_prefix_cache(self) -> str:
        """Empty the prefix cache; return the error, empty on success."""
        return await self.run_command(ResetPrefixCache, 1)

    def send_kv_command(self, message: HandoffCommand) -> None:
        """Forward a router's command about KV blocks to the driver.

        It is dropped while no driver is ready.
        """
        if self.recovery.state is RecoveryState.READY:
            self.send_to_driver(message)

    async def run_command(
        self, create: Callable[[int], WireMessage], num_workers: int | None = None
    ) -> str:
        """Send a command to the first workers, by default to all; return the first error."""
        if self.recovery.state is not RecoveryState.READY:
            return self.cause or f"the engine is {self.state}: {self.deaths.cause}"
        senders = self.senders[:num_workers]
        sends = {sender: partial(self.channels.send, sender) for sender in senders}
        return next(iter((await self.commands.run(create, sends)).values()), "")

    def send_to_driver(self, message: WireMessage) -> None:
        """Send a message to the driver of the present epoch."""
        assert self.recovery.placement is not None
        self.channels.send(self.recovery.placement.workers[0].sender, message)

    def _send_to_node(self, node: str, message: WireMessage) -> None:
        """Send a message to the agent of another machine, if that is a member."""
        remote = None if self.group is None else self.group.remotes.get(node)
        if remote is not None:
            remote.session.send(message)

    def _connect_kv_mover(self, epoch: int, descriptor: int) -> None:
        """Give the present driver its end of a channel to the KV mover."""
        assert self.recovery.placement is not None
        driver = self.recovery.placement.workers[0].sender
        self.nodes.connect_kv_mover(KvMoverConnection(driver, epoch, descriptor))

    def read_suspects(self) -> set[int]:
        """Return the wire ids of the sequences with rows in uncommitted plans."""
        return set() if self._plan_record is None else read_uncommitted(self._plan_record)

    def execute(self, actions: list[Action]) -> None:
        """Execute the actions of the recovery, and the actions that result from them."""
        self._actions.extend(actions)
        if self._is_executing:
            return
        self._is_executing = True
        try:
            while self._actions:
                self._execute(self._actions.popleft())
        except Exception as error:
            if not self.recovery.has_been_ready:
                self._start_error = error
            else:
                log.exception("the workers could not be supervised")
            self.die(f"the workers could not be supervised: {error}")
        finally:
            self._is_executing = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.recovery.next_deadline
        if deadline < float("inf"):
            delay = max(0.0, deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)
        self._notify_changed()

    def die(self, cause: str) -> None:
        """End the engine with a cause: fail all requests and end all workers."""
        self.recovery.stop()
        if self.died.is_set():
            return
        self.cause = cause
        if self._timer is not None:
            self._timer.cancel()
        self.client.fail_all(cause)
        self._detach_driver(cause)
        if self._has_connections:
            self._receiver.close()
            self._end_workers()
        self.died.set()
        self._notify_changed()

    def on_edge_opened(self, epoch: int, edge: int) -> None:
        """Handle an edge between machines that is connected; the last one lets the stages start."""
        if self.edges.on_opened(epoch, edge):
            self._initialize_if_connected()

    def _create_recovery(self, nodes: Sequence[str] | None = None) -> Recovery:
        """Return the recovery of an engine that has not started.

        nodes: name of the node of each stage; None for this machine.
        """
        planner = self.planner
        recovery = Recovery(
            planner.bounds,
            self._limits,
            self._jitter,
            self.config.stage_degrees,
            planner.should_measure,
            nodes,
            planner.repartition,
        )
        recovery.extend = planner.extend
        recovery.find_costliest = planner.find_costliest
        recovery.uses_joined_nodes = self.config.rebalance
        recovery.predict_recompute = self.client.predict_recompute_seconds
        return recovery

    def _on_timer(self) -> None:
        actions = self.recovery.on_timer(time.monotonic())
        for action in actions:
            if isinstance(action, KillWorker):
                name, about = self.recovery.name_of(action.sender), {"about": action.sender}
                log.warning("the worker of %s is killed: %s", name, action.cause, extra=about)
        self.execute(actions)

    def _end_workers(self) -> None:
        """Let all workers end; `stop` waits for them."""
        for sender in self.recovery.senders:
            # A process that has not connected yet has nothing to finish.
            if sender in self.channels.connecting:
                self.nodes.kill(sender)
            else:
                self.channels.send(sender, Shutdown())

    def _execute(self, action: Action) -> None:
        match action:
            case SpawnWorker(sender, node=node):
                self._spawn(sender, node)
            case KillWorker(sender):
                self.nodes.kill(sender)
            case CloseInstances(senders=senders):
                for sender in senders:
                    self.channels.send(sender, CloseEpoch())
            case MeasureWorkers(placement):
                assignment = NodeAssignment(placement, self.config, is_probe=True)
                self.nodes.prepare(assignment, self._folder)
            case ChooseLayers():
                layers = self.planner.choose_layers()
                self._actions += self.recovery.change_layers(layers, "", time.monotonic())
            case PrepareLayers(number, placement, cause, node, standby):
                log.info("%s: the layers are loaded while the engine serves", cause)
                assignment = NodeAssignment(placement, self.config, change=number, standby=standby)
                self.nodes.prepare(assignment, self._folder, node)
            case BeginChange(kind, cause):
                self.deaths.begin_recovery(kind, cause)
                log.info("%s; requests: %d", cause, self.client.num_requests)
            case DismissNode(node, cause):
                self._dismiss(node, cause)
            case ChangeShape(shape):
                self.planner.change_shape(shape)
            case AssignEpoch(placement, keeps_kv_cache):
                self._assign(placement, keeps_kv_cache)
            case InitializeCaches():
                self._initialize_if_connected()
            case WarmUp(epoch):
                self._warm_up(epoch)
            case DetachClient(cause):
                self.client.detach(cause)
                self._detach_driver(cause)
            case AttachClient():
                self.client.attach(self.send_to_driver)
            case RejectParked(cause):
                cause = f"{cause} from: {self.deaths.cause}"
                log.error("%s", cause)
                self.client.reject_parked(cause)
            case GiveUp(cause):
                self._has_given_up = self.recovery.has_been_ready
                self.die(cause)

    def _dismiss(self, node: str, cause: str) -> None:
        """End the membership of a node, and forget its workers."""
        log.info("%s", cause)
        assert self.group is not None
        for sender in self.group.dismiss(node, cause):
            self.channels.forget(sender)
            self.deaths.heartbeats.pop(sender, None)

    def _spawn(self, sender: int, node: str) -> None:
        try:
            remote = None if self.group is None else self.group.place(sender, node)
            if remote is None:
                address = self.channels.socket.expect(sender)
            else:
                address = ""
                self.channels.expect_remote(sender, remote.session.send)
            self.nodes.spawn(WorkerIdentity(self._run, sender, address, self._logs))
        except (OSError, zmq.ZMQError) as error:
            description = f"a process could not be started: {error}"
            asyncio.get_running_loop().call_soon(self._receiver.on_exit, sender, description)

    def _assign(self, placement: Placement, keeps_kv_cache: bool) -> None:
        """Begin an epoch, unless the files for it cannot be created.

        keeps_kv_cache: True if it may use the KV blocks of the epoch before.
        """
        self._receiver.begin_epoch(placement)
        # A warm-up request of the epoch before may not have ended.
        self.client.detach(self.deaths.cause)
        self._detach_driver(self.deaths.cause)
        self.loaded.clear()
        self.intact.clear()
        if self.group is not None:
            self.edges.begin(placement)
        self._close_plan_record()
        try:
            self._plan_record = os.memfd_create("gllm-plans")
            self.nodes.assign(
                NodeAssignment(
                    placement,
                    self.config,
                    self.deaths.cause,
                    self.client.num_requests,
                    keeps_kv_cache=keeps_kv_cache,
                ),
                self._folder,
                self._plan_record,
                self.client.totals.output_lengths.recent_lengths,
            )
        except (OSError, ValueError) as error:
            log.warning("the stages could not be assigned: %s", error)
            now = time.monotonic()
            self._actions += self.recovery.on_assignment_failed(placement.epoch, str(error), now)
            return
        if self.kv_mover.local is not None:
            self.kv_mover.local.prepare()
        self.channels.advance(placement.epoch)

    def _initialize_if_connected(self) -> None:
        """Divide the memory for KV blocks and states, once the edges of machines are connected.

        Every worker gets the same numbers of both.
        """
        if self.recovery.state is not RecoveryState.INITIALIZING:
            return
        if self.group is not None and not self.edges.is_open:
            pairs = (f"{source} and {target}" for source, target in self.edges.missing_pairs)
            log.info("waiting for the data connections between %s", ", ".join(pairs))
            return
        max_model_len, placement = self.config.max_model_len, self.recovery.placement
        assert max_model_len is not None
        assert placement is not None
        division = self._divide_memory(placement, max_model_len)
        try:
            scheduler = resolve_scheduler(self.config, placement, *division)
        except ValueError as error:
            nodes = ", ".join(dict.fromkeys(worker.node for worker in placement.workers))
            cause = f"the memory of the nodes {nodes} does not suffice: {error}"
            if not self._wait_for_memory(placement.epoch, cause):
                raise
            return
        num_blocks, num_slots = self.num_blocks, self.num_state_slots = division
        workers = self.loaded.values()
        self.kv_bytes = num_blocks * sum(worker.block_bytes for worker in workers)
        state_bytes = num_slots * sum(worker.state_bytes for worker in workers)
        if num_slots:
            log.info(
                "%d state slots in %.1f MiB, beside %d KV blocks in %.1f MiB; %d sequences at once",
                num_slots,
                state_bytes / 2**20,
                num_blocks,
                self.kv_bytes / 2**20,
                scheduler.max_num_seqs,
            )
        self.kv_bytes += state_bytes
        for sender in self.loaded:
            self.channels.send(sender, InitializeCache(num_blocks, num_slots))

    def _wait_for_memory(self, epoch: int, cause: str) -> bool:
        """Wait for the lost nodes again, or for others, where those left have too little memory.

        Returns:
            False if that cannot help, because the stages are where they were.
        """
        actions = self.recovery.on_memory_short(epoch, cause, time.monotonic())
        if not actions:
            return False
        awaited = ", ".join(self.recovery.vacant_nodes) or "other nodes"
        self.deaths.cause = f"{cause}; waiting for {awaited} or for another machine"
        log.warning("%s; requests: %d", self.deaths.cause, self.client.num_requests)
        self.execute(actions)
        return True

    def _divide_memory(self, placement: Placement, max_model_len: int) -> KvDivision:
        """Return the numbers of KV blocks and state slots of an epoch.

        Requests were accepted by the size of the first cache, so a later one is not larger. It can
        be smaller if layers have moved to other machines, but there is always one sequence of full
        length if the memory suffices at all, so that every accepted request can be resumed.
        """
        scheduler = self.config.scheduler
        num_needed = -(-max_model_len // scheduler.block_size)
        most = self.num_blocks or scheduler.max_num_seqs * num_needed
        nodes = [worker.node for worker in placement.workers]
        has_own_memory = any(report.available_bytes is not None for report in self.loaded.values())
        has_moved, self._block_nodes = nodes != self._block_nodes, nodes
        if self.num_blocks and not (has_own_memory or has_moved):
            return KvDivision(self.num_blocks, self.num_state_slots)
        limits = num_needed, most, scheduler.max_num_seqs, self.num_state_slots or None
        memories = list_placement_memories(self.config.kv_cache_memory, placement, self.loaded)
        num_blocks, num_slots = divide_kv_memory(memories, *limits)
        if self.num_blocks and has_moved:
            limit = divide_kv_memory(list_free_memories(placement, self.loaded), *limits)
            num_blocks = min(max(num_blocks, num_needed), limit.num_blocks)
            num_slots = min(num_slots, limit.num_state_slots or num_slots)
        return KvDivision(num_blocks, num_slots)

    def _detach_driver(self, cause: str) -> None:
        """End what belongs to the present driver, which has ended."""
        self.kv_events.detach()
        self.kv_mover.end_epoch()
        self.commands.fail_all(cause)

    def _close_plan_record(self) -> None:
        if self._plan_record is not None:
            os.close(self._plan_record)
            self._plan_record = None

    def _warm_up(self, epoch: int) -> None:
        """Generate one token."""
        self.nodes.on_epoch_ready()
        assert self.recovery.placement is not None
        placement = self.recovery.placement
        block_bytes = self.loaded[placement.senders[0]].block_bytes
        machines = {
            node: [worker.sender for worker in placement.workers_on(node)]
            for node in placement.node_stages
        }
        self.kv_mover.open(epoch, machines, self.nodes.kv_memory, block_bytes)
        loop = asyncio.get_running_loop()
        intact = intersect_slots(self.intact.get(sender, NO_SLOTS) for sender in placement.senders)
        if intact != NO_SLOTS:
            self.send_to_driver(AdoptKvBlocks(intact))
        # Before the first request, so that token ids of all new blocks are known.
        self.kv_events.attach(self.send_to_driver)
        stream = self.client.submit_warm_up(self.send_to_driver)

        def read_end() -> None:
            end = stream.pop_deltas()[0].end
            if end is not None:
                # Later, because the client is still delivering the step's output.
                loop.call_soon(self._on_warm, epoch, end.error)

        stream.set_listener(read_end)

    def _on_warm(self, epoch: int, error: str) -> None:
        """Handle the end of a warm-up request; `error` is empty on success."""
        recovery = self.recovery
        if epoch != recovery.epoch or recovery.state is not RecoveryState.WARMING:
            return
        if error:
            self._receiver.on_warm_up_failed(self.senders[0], error)
            return
        since, num_resumed = recovery.recovering_since, self.client.num_resumed_requests
        self.planner.begin_epoch([*self.loaded.values()])
        self.execute(recovery.on_warm(time.monotonic()))
        if since is not None:
            log.info(
                "the engine is ready again after %.2f s (%s), in epoch %d; requests resumed: %d",
                self.deaths.end_recovery(since, recovery.phase_times.seconds),
                recovery.phase_times,
                epoch,
                self.client.num_resumed_requests - num_resumed,
            )

    def _notify_changed(self) -> None:
        if self._cluster is not None:
            self._cluster.publish_state(self.state, self.state_cause, self.recovery.epoch)
        self._has_changed.set()
        for listener in self._change_listeners:
            listener()
