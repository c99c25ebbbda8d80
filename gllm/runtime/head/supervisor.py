"""Supervisor: the life of an engine's worker processes, seen from the head process.

It executes the decisions of `gllm.recovery.recovery` with a node, a hub and the client, and reports
events to them: exits, messages, heartbeats and deadlines. This module imports no torch.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

import zmq

from gllm.config.engine import EngineConfig
from gllm.config.nodes import NodesConfig
from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage, decode_for_head
from gllm.messages.control import ResetPrefixCache
from gllm.messages.handoff import HandoffCommand
from gllm.messages.lifecycle import Shutdown
from gllm.models.identity import describe_numerics
from gllm.observability.logs import LogConfig
from gllm.recovery.actions import Action, AssignGeneration, KillWorker
from gllm.recovery.node_layout import NodeShape
from gllm.recovery.placement import Placement
from gllm.recovery.records import RecoveryLimits, RecoveryState
from gllm.recovery.recovery import Recovery
from gllm.runtime.head.action_executor import ActionExecutor, Head
from gllm.runtime.head.client import EngineClient
from gllm.runtime.head.cluster_head import ClusterHead
from gllm.runtime.head.death_handler import DeathHandler
from gllm.runtime.head.deaths import DeathLog
from gllm.runtime.head.engine_error import EngineError as EngineError
from gllm.runtime.head.head_socket import HeadSocket
from gllm.runtime.head.layer_planner import LayerPlanner
from gllm.runtime.head.liveness_watch import LivenessWatch
from gllm.runtime.head.load_progress import TotalLoadProgress
from gllm.runtime.head.machine_speeds import Machine
from gllm.runtime.head.node import Node
from gllm.runtime.head.node_events import NodeEventHandler
from gllm.runtime.head.node_group import NodeGroup
from gllm.runtime.head.report_handler import ReportHandler
from gllm.runtime.head.worker_channels import WorkerChannels
from gllm.runtime.messaging.bus import Hub

log = logging.getLogger(__name__)

STOPPED = "the engine was stopped"
"""Cause of the end of an engine without a failure."""


class Supervisor:
    """The worker processes of an engine: start, recovery from deaths, commands, shutdown."""

    def __init__(
        self,
        config: EngineConfig,
        planner: LayerPlanner,
        on_progress: Callable[[int, int], None],
        nodes: NodesConfig | None = None,
    ) -> None:
        """Create the supervisor of an engine that has not started.

        Args:
            config: of the engine, with max_model_len resolved.
            planner: divides the layers among the stages.
            on_progress: called while weights are first loaded, with the bytes loaded and in total.
            nodes: machines of the engine; None for this one alone.
        """
        self.client = EngineClient()
        self.cause = ""
        """Reason for which the engine is dead."""
        self.died = asyncio.Event()
        """Set when the engine is dead."""
        self.deaths = DeathLog(config.crash_folder)
        self._config = config
        self._planner = planner
        self._recovery = make_recovery(config, planner, nodes)
        self._recovery.predict_recompute = self.client.predict_recompute_seconds
        self._executor = ActionExecutor(config, self._recovery, self.client, self.deaths, self)
        self.kv_events = self._executor.kv_events
        self.kv_mover = self._executor.kv_mover
        self.kv_mover.on_change = self._notify_changed
        self._death_handler = DeathHandler(
            self._recovery, self._executor, self.client, self.deaths, self._execute
        )
        self.node_events = NodeEventHandler(
            self._recovery,
            self._executor,
            self.client,
            self.deaths,
            self._death_handler,
            planner,
            self._execute,
        )
        self._cluster: ClusterHead | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Calls the recovery at its next deadline."""
        self._progress = TotalLoadProgress(on_progress)
        self._reports = ReportHandler(
            self._recovery,
            self._executor,
            self.client,
            self.deaths,
            self._death_handler,
            planner,
            self._progress,
            self._execute,
        )
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
        if self._recovery.is_over:
            return "dead"
        if not self._recovery.has_been_ready:
            return "loading"
        if self._is_draining:
            return "draining"
        if self._recovery.state is not RecoveryState.READY:
            return "recovering"
        return "sleeping" if self._is_sleeping else "ready"

    @property
    def layers(self) -> list[range]:
        """Layers of each stage."""
        return self._planner.layers

    @property
    def generation(self) -> int:
        """Number of the present generation; 0 before the first."""
        return self._recovery.generation

    @property
    def recovering_since(self) -> float | None:
        """Time at which the running recovery began; None if none runs."""
        return None if self._recovery.is_over else self._recovery.recovering_since

    @property
    def is_recovery_overdue(self) -> bool:
        """True if the running recovery has taken longer than `recovery_timeout`."""
        return self._recovery.is_overdue

    @property
    def state_cause(self) -> str:
        """Reason of the death or of the running recovery; otherwise empty."""
        return self.cause or (self.deaths.cause if self.recovering_since is not None else "")

    @property
    def numerics(self) -> str:
        """See StageLoaded, for all stages; known once they are loaded."""
        loaded = [self._executor.loaded.get(sender) for sender in self.senders]
        executors = (each.numerics for each in loaded if each is not None)
        return describe_numerics(executors, list(map(len, self.layers)), self._recovery.degrees)

    @property
    def node(self) -> Node:
        """Node of the workers, after `start`."""
        return self._executor.connections.nodes.local

    @property
    def placement(self) -> Placement | None:
        """Workers, layers and nodes of the present generation; None before the first."""
        return self._recovery.placement

    @property
    def senders(self) -> list[int]:
        """Workers of the present generation, by stage, then by rank."""
        return [] if self.placement is None else self.placement.senders

    @property
    def num_blocks(self) -> int:
        """KV blocks of each worker; 0 before the weights are loaded."""
        return self._executor.num_blocks

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache over all workers."""
        return self._executor.kv_bytes

    @property
    def num_stale_frames(self) -> int:
        """Messages of earlier generations that arrived late and were dropped."""
        head = self._executor.head
        return 0 if head is None else head.channels.num_stale + head.nodes.num_stale

    async def start(
        self, folder: Path, node: Node, logs: LogConfig, cluster: ClusterHead | None = None
    ) -> None:
        """Load a model and run one token through all stages.

        Args:
            folder: of the model.
            node: of the workers.
            logs: configuration of the workers' logs.
            cluster: nodes that have joined; None for this machine alone.

        Raises:
            EngineError: a stage failed, or the engine was stopped before.
            ValueError: the memory does not suffice for the configuration.
        """
        if self._is_stopped:
            raise EngineError(self.cause)
        context = self._context = zmq.Context()
        self._cluster = cluster
        run = secrets.randbits(64) if cluster is None else cluster.run
        channels = WorkerChannels(hub := Hub(context, run, decode_for_head), HeadSocket(hub))
        channels.start(self._on_messages, self._death_handler.on_session_lost)
        nodes = NodeGroup(node)
        self._executor.head = Head(run, channels, nodes, folder, logs)
        nodes.watch(self._death_handler.on_exit)
        if cluster is not None:
            cluster.begin(
                context,
                self._executor,
                self.node_events,
                self._death_handler,
                self._on_messages,
            )
        if self._config.max_restarts:
            self._reports.liveness = LivenessWatch(
                self._recovery, nodes, self._config.freeze_timeout, self._death_handler.on_frozen
            )
        try:
            self._execute(self._recovery.start(time.monotonic()))
            if cluster is not None:
                cluster.on_started()
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

    def set_nodes(self, nodes: Sequence[str], machines: Mapping[str, Machine]) -> None:
        """Set the name of each stage's node, the first one the head's; and the machines by name."""
        self._planner.set_nodes(nodes, machines)
        self._recovery.set_nodes(nodes, self._planner.should_measure)

    def add_change_listener(self, listener: Callable[[], None]) -> None:
        """Call a function after each event that may change the state."""
        self._change_listeners.append(listener)

    async def drain(self, seconds: float) -> None:
        """Wait until running requests have ended, for at most this long; recoveries go on."""
        self._is_draining = self.state in ("ready", "recovering")
        self._notify_changed()
        deadline = time.monotonic() + seconds
        while self.client.num_requests and self.state == "draining" and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """End the workers; running requests end with an error."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._die(STOPPED)
        head = self._executor.head
        if head is not None:
            await head.nodes.stop()
        if self._cluster is not None:
            await self._cluster.stop(self.cause, is_failure=self.cause != STOPPED)
        if head is not None:
            head.channels.close()
        if self._context is not None:
            self._context.term()
        self._executor.close()
        self.deaths.close(self._has_given_up and self._config.max_restarts > 0)

    def set_sleeping(self, is_on: bool) -> None:
        """Change the state between ready and sleeping; users of the engine then refuse requests."""
        self._is_sleeping = is_on
        self._notify_changed()

    async def reset_prefix_cache(self) -> str:
        """Empty the prefix cache; return the error, empty on success."""
        return await self.run_command(ResetPrefixCache, 1)

    def send_kv_command(self, message: HandoffCommand) -> None:
        """Pass a command about KV blocks to the driver, if there is one."""
        if self._recovery.state is RecoveryState.READY:
            self._executor.send_to_driver(message)

    async def run_command(
        self, create: Callable[[int], WireMessage], num_workers: int | None = None
    ) -> str:
        """Send a command to the first workers, by default to all; return the first error."""
        if self._recovery.state is not RecoveryState.READY:
            return self.cause or f"the engine is {self.state}: {self.deaths.cause}"
        receivers = self.senders[:num_workers]
        channels = self._executor.connections.channels
        return await self._executor.commands.run(create, channels, receivers)

    def _execute(self, actions: list[Action]) -> None:
        """Execute the actions that follow from an event."""
        for action in actions:
            if isinstance(action, AssignGeneration):
                self._reports.begin_generation(action.placement)
        try:
            self._executor.execute(actions)
        except Exception as error:
            if not self._recovery.has_been_ready:
                self._start_error = error
            else:
                log.exception("the workers could not be supervised")
            self._die(f"the workers could not be supervised: {error}")
        self._schedule_timer()
        self._notify_changed()

    def _schedule_timer(self) -> None:
        """Set the timer to the next deadline of the recovery."""
        self._cancel_timer()
        deadline = self._recovery.next_deadline
        if deadline < float("inf"):
            delay = max(0.0, deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        actions = self._recovery.on_timer(time.monotonic())
        for action in actions:
            if isinstance(action, KillWorker):
                name, about = self._recovery.name_of(action.sender), {"about": action.sender}
                log.warning("the worker of %s is killed: %s", name, action.cause, extra=about)
        self._execute(actions)

    def _die(self, cause: str) -> None:
        """Fail everything with the cause, once."""
        self._recovery.stop()
        if self.died.is_set():
            return
        self.cause = cause
        self._cancel_timer()
        self._reports.close()
        self._executor.fail_all(cause)
        self._end_workers()
        self.died.set()
        self._notify_changed()

    def _end_workers(self) -> None:
        """Let all workers end; `stop` waits for them."""
        head = self._executor.head
        if head is None:
            return
        for sender in self._recovery.senders:
            # A process that has not connected yet has nothing to finish.
            if head.channels.is_connecting(sender):
                head.nodes.kill(sender)
            else:
                head.channels.send(sender, Shutdown())

    def _on_messages(self, messages: list[tuple[int, AnyMessage]]) -> None:
        try:
            for sender, message in messages:
                self._reports.on_message(sender, message)
        except Exception as error:
            # The other messages are lost, so their requests would wait forever.
            log.exception("a message of the workers could not be handled")
            self._die(f"a message could not be handled: {type(error).__name__}: {error}")

    def on_assignment_failed(self, generation: int, cause: str) -> None:
        """See ActionListener."""
        self._execute(self._recovery.on_assignment_failed(generation, cause, time.monotonic()))

    def on_all_measured(self) -> None:
        """See ActionListener."""
        bounds = self._planner.choose_layers()
        self._execute(self._recovery.change_layers(bounds, "", time.monotonic()))

    def on_shape_changed(self, shape: NodeShape) -> None:
        """See ActionListener."""
        self._planner.change_shape(shape)

    def on_memory_short(self, generation: int, cause: str) -> bool:
        """See ActionListener."""
        return self.node_events.on_memory_short(generation, cause)

    def on_warm(self, generation: int, error: str) -> None:
        """Handle the end of a warm-up request."""
        if generation != self.generation or self._recovery.state is not RecoveryState.WARMING:
            return
        if error:
            self._death_handler.on_warm_up_failed(self.senders[0], error)
            return
        since, num_resumed = self.recovering_since, self.client.num_resumed_requests
        self._planner.begin_generation([*self._executor.loaded.values()])
        self._execute(self._recovery.on_warm(time.monotonic()))
        if since is not None:
            log.info(
                "the engine is ready again after %.2f s, in generation %d; requests resumed: %d",
                self.deaths.end_recovery(since),
                generation,
                self.client.num_resumed_requests - num_resumed,
            )

    def on_exit(self, sender: int, description: str) -> None:
        """See ActionListener."""
        self._death_handler.on_exit(sender, description)

    def on_give_up(self, cause: str) -> None:
        """See ActionListener."""
        self._has_given_up = self._recovery.has_been_ready
        self._die(cause)

    def _notify_changed(self) -> None:
        if self._cluster is not None:
            self._cluster.publish_state(self.state, self.state_cause, self.generation)
        self._has_changed.set()
        for listener in self._change_listeners:
            listener()


def make_recovery(
    config: EngineConfig, planner: LayerPlanner, nodes: NodesConfig | None
) -> Recovery:
    """Return the recovery of an engine that has not started.

    Args:
        config: of the engine.
        planner: divides the layers among the stages.
        nodes: its machines; None for this one alone.
    """
    recovery = Recovery(
        planner.bounds,
        make_recovery_limits(config, nodes),
        Random(secrets.randbits(64)),
        config.stage_degrees,
        planner.should_measure,
        recut=planner.recut,
    )
    recovery.extend = planner.extend
    recovery.find_costliest = planner.find_costliest
    recovery.uses_joined_nodes = config.rebalance
    return recovery


def make_recovery_limits(config: EngineConfig, nodes: NodesConfig | None) -> RecoveryLimits:
    """Return the limits of an engine's recovery.

    Args:
        config: of the engine.
        nodes: its machines; None for this one alone, where nothing waits for another one.
    """
    return RecoveryLimits(
        config.max_restarts,
        config.recovery_timeout,
        # Without restarts nothing could use a standby worker.
        config.standby_workers if config.max_restarts else 0,
        spare_preloads=nodes is not None and nodes.spare_preloads,
        node_return_seconds=0.0 if nodes is None else nodes.node_return_timeout,
        join_seconds=0.0 if nodes is None else nodes.join_timeout,
    )
