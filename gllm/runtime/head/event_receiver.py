"""Receiver of all that arrives at the head process; it turns it into events for the recovery.

Reports of workers, exits of their processes and ends of their sessions, messages of the agents of
other machines, nodes that join and nodes that are lost. `Supervisor` executes what follows.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gllm.messages import lifecycle, nodes
from gllm.messages.codec import AnyMessage, decode_for_head
from gllm.messages.handoff import FirstChunkComputed, KvPushStarted
from gllm.messages.kv_cache import KvCacheEvents
from gllm.messages.kv_disk import KvDiskTotals
from gllm.messages.kv_transfer import KvMoverStuck, KvTransferTotals
from gllm.messages.reports import BubbleReport, StageMeasured, StageUtilization, StepCostReport
from gllm.messages.requests import EngineOutputs
from gllm.observability.child_process import has_import_failure, was_killed
from gllm.recovery.actions import Action, GiveUp, KillWorker
from gllm.recovery.liveness import FrozenDetector
from gllm.recovery.placement import LOCAL_NODE, Placement
from gllm.recovery.records import RecoveryState
from gllm.recovery.recovery import Recovery
from gllm.runtime.head.deaths import WorkerDeath
from gllm.runtime.head.layer_planner import Machine, format_layers
from gllm.runtime.head.node import Node
from gllm.runtime.head.node_group import REPEAT_SECONDS, NodeGroup, RemoteNode
from gllm.runtime.head.node_hub import AgentSession, configured_threads
from gllm.runtime.messaging.session import SessionError

if TYPE_CHECKING:
    from gllm.runtime.head.cluster_head import ClusterHead
    from gllm.runtime.head.node_hub import NodeHub
    from gllm.runtime.head.supervisor import Supervisor

log = logging.getLogger(__name__)

REPORT_SECONDS = 0.05
"""Time after an exit in which the last messages of the process may still arrive."""
LOST_SECONDS = 1.0
"""Time after the end of a session in which the exit of its process may still be reported."""

DUMP_SECONDS = 0.3
"""Time in which a frozen worker writes its stacks before it is killed."""


class EventReceiver:
    """Handles worker messages, process exits, and machines that join or are lost, for the head.

    It converts them to events for the recovery's state machine, which decides what is restarted.
    """

    _group: NodeGroup
    """Machines of the engine; set if there are several."""
    _hub: "NodeHub"
    """Sessions with the agents; set if there are several machines."""

    def __init__(
        self,
        supervisor: "Supervisor",
        on_progress: Callable[[int, int], None],
        cluster: "ClusterHead | None",
    ) -> None:
        """Create the receiver of an engine that starts, on the running event loop.

        Args:
            supervisor: has the recovery, the requests and the connections; executes actions.
            on_progress: called while weights are first loaded, with the bytes loaded and in total.
            cluster: other machines; None for this one alone.
        """
        self._supervisor = supervisor
        self._recovery = supervisor.recovery
        self._client = supervisor.client
        self._deaths = supervisor.deaths
        self._channels = supervisor.channels
        self._nodes = supervisor.nodes
        self._execute = supervisor.execute
        self._on_progress = on_progress
        self._cluster = cluster
        if cluster is not None:
            assert supervisor.group is not None
            self._hub, self._group = cluster.hub, supervisor.group
        self._loading: dict[int, lifecycle.LoadProgress] = {}
        """Latest progress of each worker that loads."""
        self._timers: dict[int, asyncio.TimerHandle] = {}
        """By worker: the handling of its exit, or of the end of its session without an exit."""
        # Without restarts frozen workers are left alone, but /health says so.
        self._liveness = LivenessWatch(
            self._recovery,
            self._nodes,
            supervisor.config.freeze_timeout,
            self._on_frozen if supervisor.config.max_restarts else None,
            None if cluster is None else self._group.is_silent,
        )

    def begin_epoch(self, placement: Placement) -> None:
        """Reset the progress of loading, and check the workers of a new epoch for freezes."""
        self._loading.clear()
        self._liveness.watch(placement)

    def close(self) -> None:
        """Stop the checks for frozen workers."""
        self._liveness.close()

    def has_living_step(self, timeout_seconds: float) -> bool:
        """Return True if a worker computes a step that may still end by itself.

        timeout_seconds: health timeout; see `FrozenDetector.has_living_step`.
        """
        predicted, costs = 0.0, self._client.coefficients
        if costs is not None:
            beats = self._deaths.heartbeats.values()
            sizes = [beat.num_tokens for beat in beats if beat.step >= 0]
            predicted = max((costs.predict_prefill_seconds([size]) for size in sizes), default=0.0)
        return self._liveness.has_living_step(timeout_seconds, predicted)

    # Reports of workers.

    def on_messages(self, messages: list[tuple[int, AnyMessage]]) -> None:
        """Handle messages of workers, with their senders."""
        try:
            for sender, message in messages:
                self.on_message(sender, message)
        except Exception as error:
            # The other messages are lost, so their requests would wait forever.
            log.exception("a message of the workers could not be handled")
            cause = f"a message could not be handled: {type(error).__name__}: {error}"
            self._supervisor.die(cause)

    def on_message(self, sender: int, message: AnyMessage) -> None:
        """Handle a message of a worker."""
        match message:
            case EngineOutputs():
                self._client.on_report(message)
                if message.outcome.num_step_tokens:
                    self._recovery.on_step_committed()
            case StageUtilization() | BubbleReport() | StepCostReport():
                self._client.on_report(message)
                if isinstance(message, StageUtilization):
                    self._on_utilization(message)
            case KvCacheEvents():
                self._supervisor.kv_events.on_events(message)
            case KvPushStarted() | FirstChunkComputed():
                self._supervisor.kv_mover.on_prefill(message)
            case KvTransferTotals():
                self._supervisor.kv_mover.totals += message
            case KvDiskTotals():
                mover = self._supervisor.kv_mover
                mover.disk_totals = (mover.disk_totals or KvDiskTotals()) + message
            case KvMoverStuck(machine):
                self._supervisor.kv_mover.restart(machine)
            case lifecycle.Heartbeat():
                self._deaths.heartbeats[sender] = message
                self._liveness.on_heartbeat(sender, message)
            case lifecycle.CommandDone():
                self._supervisor.commands.on_done(sender, message)
            case lifecycle.LoadProgress():
                self._recovery.on_progress(sender, time.monotonic())
                if not self._recovery.has_been_ready:
                    self._loading[sender] = message
                    parts = self._loading.values()
                    done = sum(part.done_bytes for part in parts)
                    self._on_progress(done, sum(part.total_bytes for part in parts))
            case lifecycle.StageFailed(cause=cause):
                place = self._recovery.name_of(sender) or "a standby worker"
                cause = f"{place} failed: {cause}"
                self._on_death(sender, "failed", cause, self._recovery.on_failed)
            case _:
                self._execute(self._report_phase(sender, message, time.monotonic()))

    def _report_phase(self, sender: int, message: AnyMessage, now: float) -> list[Action]:
        """Report the end of a phase of a worker; return the actions that follow."""
        match message:
            case lifecycle.Hello():
                self._channels.connecting.discard(sender)
                return self._recovery.on_connected(sender, now)
            case StageMeasured():
                self._supervisor.planner.on_measured(message)
                return self._recovery.on_measured(sender, now, message.keeps_weights)
            case lifecycle.LayersPrepared(change, num_bytes, reason, is_failed):
                place = self._recovery.name_of(sender) or f"the new worker {sender}"
                outcome = reason or f"{num_bytes / 2**20:.1f} MiB read"
                log.info("planned change %d: %s has prepared: %s", change, place, outcome)
                error = f"{place} cannot load its layers: {reason}" if is_failed else ""
                return self._recovery.on_prepared(sender, change, now, error)
            case lifecycle.StageLoaded():
                self._supervisor.loaded[sender] = message
                return self._recovery.on_loaded(sender, now, message.keeps_weights)
            case lifecycle.StageReady(kv_layout=layout, intact=intact):
                self._supervisor.kv_mover.add_layout(sender, layout)
                self._supervisor.intact[sender] = intact
                return self._recovery.on_ready(sender, now)
            case lifecycle.EpochClosed():
                return self._recovery.on_closed(sender, now)
        return []

    def _on_utilization(self, message: StageUtilization) -> None:
        """Begin an epoch with other layers if they have been faster for long enough."""
        if self._recovery.state is not RecoveryState.READY or message.rank:
            return
        now = time.monotonic()
        better = self._supervisor.planner.on_totals(
            message.stage, message.num_steps, message.busy_seconds, now
        )
        if better is not None:
            cause = f"the layers are divided anew: {format_layers(better.layers)}"
            bounds = [(part.start, part.stop) for part in better.layers]
            self._execute(self._recovery.change_layers(bounds, cause, now))

    # Deaths of workers.

    def on_exit(self, sender: int, description: str) -> None:
        """Handle the exit of a process, after its last messages."""
        self._forget_timer(sender)
        is_complete = self._recovery.is_exiting(sender) or self._has_nothing_to_report(
            sender, description
        )
        delay = 0.0 if is_complete else REPORT_SECONDS
        stacks, now = self._read_stacks(sender), time.monotonic()
        self._timers[sender] = asyncio.get_running_loop().call_later(
            delay, self._on_reaped, sender, description, stacks, now
        )

    def _has_nothing_to_report(self, sender: int, description: str) -> bool:
        """Return True if no late message of an exited process can change what follows.

        A process that a signal has ended reports no cause; only the driver has tokens to report.
        """
        placement = self._recovery.placement
        is_driver = placement is not None and placement.senders[0] == sender
        return was_killed(description) and not is_driver

    def on_session_lost(self, sender: int, cause: str) -> None:
        """Handle the end of a worker's message session.

        The worker is replaced unless the exit of its process is reported soon, with its own cause.
        """
        if sender in self._timers or self._recovery.is_exiting(sender):
            # Its exit is known already, or follows.
            return
        place = self._recovery.name_of(sender)
        worker = "a standby worker" if place is None else f"the worker of {place}"
        cause = f"the connection to {worker} was lost: {cause}"
        self._timers[sender] = asyncio.get_running_loop().call_later(
            LOST_SECONDS, self._on_lost, sender, cause
        )

    def on_warm_up_failed(self, driver: int, error: str) -> None:
        """Handle the error of an epoch's first step, which its driver has reported."""
        cause = f"the warm-up step failed: {error}"
        self._on_death(driver, "failed", cause, self._recovery.on_failed)

    def _on_frozen(self, sender: int, cause: str) -> None:
        self._on_death(sender, "frozen", cause, self._recovery.on_lost)

    def _on_lost(self, sender: int, cause: str) -> None:
        del self._timers[sender]
        self._on_death(sender, "lost", cause, self._recovery.on_lost)

    def _forget_timer(self, sender: int) -> None:
        if (timer := self._timers.pop(sender, None)) is not None:
            timer.cancel()

    def _on_reaped(self, sender: int, description: str, stacks: str, now: float) -> None:
        """Handle the exit of a process whose last messages have arrived."""
        del self._timers[sender]
        self._channels.forget(sender)
        if self._cluster is not None:
            self._group.forget(sender)
        place, is_exiting = self._recovery.name_of(sender), self._recovery.is_exiting(sender)
        if place is not None and not is_exiting:
            cause = f"the worker of {place} ({description})"
            recovery = self._recovery
            is_final = has_import_failure(description)
            report = recovery.on_import_failed if is_final else recovery.on_exit
            self._on_death(sender, "killed", cause, report, stacks, now)
            return
        if not (is_exiting or self._recovery.is_over):
            log.warning("a standby worker has ended: %s", description)
        self._deaths.heartbeats.pop(sender, None)
        self._execute(self._recovery.on_exit(sender, description, now))

    def _on_death(
        self,
        sender: int,
        kind: str,
        cause: str,
        report: Callable[[int, str, float, bool], list[Action]],
        stacks: str = "",
        now: float | None = None,
    ) -> None:
        """Handle the unplanned death of a worker.

        Args:
            sender: the worker.
            kind: killed, failed, frozen or lost.
            cause: description for logs and errors.
            report: method of the recovery for this event.
            stacks: stacks that the process has written.
            now: time at which it was noticed; by default now.
        """
        recovery = self._recovery
        if recovery.is_over or recovery.is_exiting(sender):
            return
        now = time.monotonic() if now is None else now
        place = recovery.name_of(sender)
        if place is None:
            log.warning("a standby worker has died: %s", cause)
            self._execute(report(sender, cause, now, False))
            return
        was_ready = recovery.state is RecoveryState.READY
        num_requests, epoch = self._client.num_requests, recovery.epoch
        suspects = self._supervisor.read_suspects() if was_ready else set()
        is_poison = was_ready and self._client.on_death(suspects)
        stacks = stacks or self._read_stacks(sender)
        death = WorkerDeath(sender, place, kind, cause, now, stacks)
        actions = report(sender, cause, now, is_poison)
        if was_ready and not any(isinstance(action, GiveUp) for action in actions):
            self._deaths.begin_recovery(kind, cause)
        evidence = self._deaths.keep_evidence(death, epoch, num_requests, suspects)
        self._execute(actions)
        if not recovery.is_over:
            log.warning(
                "%s; requests: %d, sequences being computed: %d%s; evidence: %s",
                cause,
                num_requests,
                len(suspects),
                ", one of which has caused it and was ended" if is_poison else "",
                evidence,
                extra={"about": sender},
            )

    def _read_stacks(self, sender: int) -> str:
        """Return the stacks that a process has written; empty if they cannot be read."""
        try:
            return self._nodes.read_stacks(sender)
        except Exception:
            log.exception("the stacks of a worker could not be read")
            return ""

    # Other machines: NodeListener, and edges between machines.

    def add_members(self) -> None:
        """Add the nodes with which the engine starts."""
        for session in self._hub.sessions.values():
            self._group.add(RemoteNode(session))
        self._hub.listener = self

    def add_spares(self, members: Sequence[str]) -> None:
        """Report the machines that have joined but have no stage, after the start of the engine.

        Args:
            members: machines with which it starts; some may have been lost since they joined.
        """
        for name, session in list(self._hub.sessions.items()):
            if name not in members:
                self._on_joined(session, [], session.join.is_spare)
        for name in members:
            if name not in self._hub.sessions:
                self._on_node_gone(name, f"node {name} was lost")

    def on_node_joined(self, session: AgentSession) -> None:
        """Handle a machine that has joined; it is a member once `NodeHub.welcome` is called."""
        join, name = session.join, session.name
        self._group.add(RemoteNode(session))
        workers = join.workers if join.run == self._hub.run else []
        capacity = session.capacity(self._num_workers)
        # The agent keeps these and kills the others by itself. It has to know it, and the routes to
        # them have to exist, before they may be assigned stages.
        wanted = self._recovery.returning_workers(name, capacity, workers)
        for sender in wanted:
            self._group.place(sender, name)
            self._channels.expect_remote(sender, session.send)
            self._channels.connecting.discard(sender)
        self._hub.welcome(session, wanted)
        assert self._cluster is not None
        session.send(self._cluster.published_state)
        self._on_joined(session, wanted, join.is_spare)

    def on_node_message(self, session: AgentSession, message: AnyMessage) -> None:
        """Handle a message of a member."""
        remote = self._group.remotes.get(session.name)
        if remote is None or remote.session is not session:
            self._channels.drop()
            return
        edges = self._supervisor.edges
        match message:
            case nodes.WorkerFrame():
                self._on_worker_frame(remote, message)
            case nodes.StageFrame() if message.sender in remote.workers and self._group.proxies:
                self._group.proxies.on_frame(message)
            case nodes.WorkerExited(sender, description, stacks) if sender in remote.workers:
                remote.on_exited(sender, description, stacks)
            case nodes.WorkerStacks(sender, stacks):
                remote.on_stacks(sender, stacks)
            case nodes.WorkerSessionLost(sender, cause) if sender in remote.workers:
                self.on_session_lost(sender, cause)
            case nodes.AssignmentFailed(epoch, cause) if self._is_preparing(epoch):
                log.warning(
                    "the layers of epoch %d are loaded later: node %s: %s",
                    epoch,
                    session.name,
                    cause,
                )
                now = time.monotonic()
                self._execute(self._recovery.on_preparation_failed(epoch, now))
            case nodes.AssignmentFailed(epoch, cause) if self._has_stages(session.name):
                cause = f"node {session.name} could not assign the stages: {cause}"
                self._on_epoch_failed(epoch, cause)
            case nodes.EdgeOpened(epoch, edge) if edges.has_end(edge, session.name):
                self._supervisor.on_edge_opened(epoch, edge)
            case nodes.EdgeLost(epoch, edge, cause) if edges.has_end(edge, session.name):
                self.on_edge_lost(epoch, edge, cause)
            case nodes.KvMachineOpened(epoch, machine):
                self._supervisor.kv_mover.on_opened(session.name, epoch, machine)
            case _:
                # About a worker or an edge that is gone, or is none of this node.
                self._channels.drop()

    def on_node_lost(
        self, session: AgentSession, cause: str, is_death: bool, has_left: bool
    ) -> None:
        """Handle the end of a node's session, as `NodeListener.on_node_lost` specifies."""
        remote = self._group.remotes.get(session.name)
        if remote is None or remote.session is not session:
            return
        self._group.remove(remote)
        node = f"node {session.name} ({session.address})"
        if has_left:
            self._on_node_gone(session.name, f"{node} has left: {cause}", has_left=True)
        else:
            self._on_node_gone(session.name, f"{node} was lost: {cause}", is_death)

    def on_edge_lost(self, epoch: int, edge: int, cause: str) -> None:
        """Handle an edge between nodes that stays disconnected: the epoch ends."""
        lost = self._supervisor.edges.on_lost(epoch, edge, time.monotonic())
        if lost is None:
            return
        pair, is_repeated = lost
        name = pair[0] if pair[1] == LOCAL_NODE else pair[1]
        head = self._group.local_peer.node
        source, target = (head if node == LOCAL_NODE else node for node in pair)
        cause = f"the data connection from node {source} to node {target} was lost: {cause}"
        if is_repeated:
            log.warning(
                "nodes %s and %s have lost their data connection twice within %g seconds: check "
                "the network between them",
                source,
                target,
                REPEAT_SECONDS,
            )
        if not (is_repeated and self._exchange(name, cause)):
            self._on_epoch_failed(epoch, cause)

    @property
    def _num_workers(self) -> int:
        """Workers of the engine at its start."""
        return sum(self._supervisor.config.stage_degrees)

    def _on_worker_frame(self, remote: RemoteNode, frame: nodes.WorkerFrame) -> None:
        """Handle a worker's message; one that it may not send ends the session of its node."""
        if frame.sender not in remote.workers:
            self._channels.drop()
            return
        if not self._channels.accepts(frame):
            return
        try:
            message = decode_for_head(frame.payload)
        except Exception as error:
            raise SessionError(f"no message that a worker may send: {error}") from error
        if isinstance(message, lifecycle.Hello) and message.sender != frame.sender:
            raise SessionError(f"worker {frame.sender} sent the Hello of {message.sender}")
        self.on_messages([(frame.sender, message)])

    def _on_joined(self, session: AgentSession, workers: Sequence[int], is_spare: bool) -> None:
        """Report a node that has joined or returned.

        Args:
            session: session of its agent.
            workers: living workers of an earlier session that it keeps; their instances are closed.
            is_spare: True if it gets stages only when other nodes are lost.
        """
        name, join = session.name, session.join
        threads = configured_threads(self._hub.facts.config, join.config)
        self._supervisor.planner.add_machine(name, Machine(join.facts, threads))
        capacity, now = session.capacity(self._num_workers), time.monotonic()
        actions = self._recovery.on_node_joined(name, capacity, workers, now, is_spare)
        # The agent has been told which workers it keeps, and nothing awaits the others' exits.
        unwanted = set(workers).difference(self._recovery.workers_on(name))
        self._execute(
            [
                action
                for action in actions
                if not (isinstance(action, KillWorker) and action.sender in unwanted)
            ]
        )

    def _on_node_gone(
        self, node: str, cause: str, is_death: bool = False, has_left: bool = False
    ) -> None:
        """Report the loss of a node.

        Args:
            node: its name.
            cause: complete description, which names the node.
            is_death: True if its agent has died, so that a running request may be to blame.
            has_left: True if it has ended its membership by itself.
        """
        if self._recovery.is_over:
            return
        is_ready = self._recovery.state is RecoveryState.READY
        was_ready = is_ready and self._has_stages(node)
        suspects = self._supervisor.read_suspects() if was_ready and is_death else set()
        is_poison = bool(suspects) and self._client.on_death(suspects)
        for sender in self._recovery.workers_on(node):
            self._channels.forget(sender)
            self._forget_timer(sender)
            self._deaths.heartbeats.pop(sender, None)
        now = time.monotonic()
        actions = self._recovery.on_node_lost(node, cause, now, is_death, is_poison, has_left)
        self._end_epoch(actions, cause, was_ready)
        if node in self._recovery.vacant_nodes and not has_left:
            seconds = self._recovery.return_until - now
            log.info("the stages of node %s wait for it, for at most %.1f s", node, seconds)
        if is_poison:
            log.warning("a request that was computed on node %s has caused this and ends", node)

    def _on_epoch_failed(self, epoch: int, cause: str) -> None:
        """Report an epoch whose workers on different nodes cannot reach each other."""
        if self._recovery.is_over or epoch != self._recovery.epoch:
            return
        was_ready = self._recovery.state is RecoveryState.READY
        actions = self._recovery.on_epoch_failed(epoch, cause, time.monotonic())
        self._end_epoch(actions, cause, was_ready, "link")

    def _exchange(self, name: str, cause: str) -> bool:
        """Give the stages of a node that is not lost to spares; return False if there are none.

        It becomes a spare itself. Its workers end, because the spare's are other ones.
        """
        session = self._hub.sessions.get(name)
        if session is None or not set(self._hub.membership.spares) - {name}:
            return False
        log.warning("a spare node takes the stages of node %s", name)
        remote = self._group.remotes[name]
        for sender in sorted(remote.workers):
            remote.kill(sender)
        self._group.remove(remote)
        self._group.add(RemoteNode(session))
        self._on_node_gone(name, cause, has_left=True)
        # Not one that gets stages again as soon as possible.
        self._on_joined(session, [], is_spare=True)
        return True

    def _has_stages(self, node: str) -> bool:
        return node in self._supervisor.node_stages

    def _is_preparing(self, epoch: int) -> bool:
        """Return True if an epoch is that of a planned change, which is being prepared."""
        is_ready = self._recovery.state is RecoveryState.READY
        return is_ready and epoch == self._recovery.epoch + 1

    def _end_epoch(
        self, actions: list[Action], cause: str, was_ready: bool, kind: str = "node"
    ) -> None:
        """Log the end of an epoch and execute what follows."""
        num_requests = self._client.num_requests
        if was_ready and not any(isinstance(action, GiveUp) for action in actions):
            self._deaths.begin_recovery(kind, cause)
        self._execute(actions)
        if not self._recovery.is_over:
            log.warning("%s; requests: %d", cause, num_requests)


class LivenessWatch:
    """Checks periodically that the workers make progress; reports frozen ones with their stacks."""

    def __init__(
        self,
        recovery: Recovery,
        nodes: Node,
        freeze_seconds: float,
        on_frozen: Callable[[int, str], None] | None,
        is_silent: Callable[[int], bool] | None = None,
    ) -> None:
        """Start the checks on the running event loop.

        Args:
            recovery: knows which workers have been killed.
            nodes: run the workers.
            freeze_seconds: time for which a frozen worker has been stopped.
            on_frozen: called with the sender of a frozen worker and a description; None if frozen
                workers are left alone.
            is_silent: returns True if nothing is known of a worker, because its machine is silent;
                None if all workers run on this machine.
        """
        self._recovery = recovery
        self._nodes = nodes
        self._on_frozen = on_frozen
        self._is_silent = is_silent
        self._loop = asyncio.get_running_loop()
        self._detector = FrozenDetector(freeze_seconds)
        self._placement: Placement | None = None
        self._timer = self._loop.call_later(self._detector.check_seconds, self._check)

    def watch(self, placement: Placement) -> None:
        """Watch the workers of a new epoch and no others."""
        self._placement = placement
        self._detector.watch(placement.senders)

    def on_heartbeat(self, sender: int, message: lifecycle.Heartbeat) -> None:
        """Handle a worker's heartbeat."""
        step = None if message.step < 0 else message.step
        now, seconds = time.monotonic(), message.step_seconds
        self._detector.on_heartbeat(sender, step, seconds, now, message.is_waiting)

    def has_living_step(self, timeout_seconds: float, predicted_seconds: float) -> bool:
        """Return True if a step is under way that may still end by itself."""
        now = time.monotonic()
        return self._detector.has_living_step(now, timeout_seconds, predicted_seconds)

    def close(self) -> None:
        """End the checks."""
        self._timer.cancel()

    def _check(self) -> None:
        self._timer = self._loop.call_later(self._detector.check_seconds, self._check)
        if self._placement is None:
            return
        now = time.monotonic()
        sampled = {sender: self._nodes.sample(sender) for sender in self._placement.senders}
        samples = {sender: sample for sender, sample in sampled.items() if sample is not None}
        # A silent node is lost as a whole, or its workers are heard again.
        if self._is_silent is not None:
            self._detector.restart_times(filter(self._is_silent, self._placement.senders), now)
        is_serving = self._recovery.state is RecoveryState.READY
        causes = self._detector.check(samples, now, is_serving)
        if self._on_frozen is None:
            return
        for sender, cause in causes.items():
            if not self._recovery.is_exiting(sender):
                self._nodes.dump_stacks(sender)
                place = self._placement.name_of(sender)
                cause = f"the worker of {place} is frozen: {cause}"
                self._loop.call_later(DUMP_SECONDS, self._report, sender, cause)

    def _report(self, sender: int, cause: str) -> None:
        """Report a frozen worker, once it had the time to write its stacks."""
        if self._on_frozen is not None and not self._recovery.is_exiting(sender):
            stacks = self._nodes.read_stacks(sender) or "none"
            log.warning("%s; its stacks: %s", cause, stacks, extra={"about": sender})
            self._on_frozen(sender, cause)
